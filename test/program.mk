# What test/cluster and test/kubeproxy share: as root, with Go, they build a program of Kubernetes, whose module is the folder PROGRAM, once
# into the user's cache as BUILT, and the shipped binary as FAIRLEAD.
GO ?= go
export CGO_ENABLED = 0
# The product's requirements change under these modules': let Go follow them.
FOLLOW := -mod=mod
KUBERNETES := v1.37.2
STAMP := k8s.io/component-base/version
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fairlead
BUILT := $(CACHE)/$(PROGRAM)-$(KUBERNETES)
export FAIRLEAD ?= $(abspath ../../bin/fairlead)

.PHONY: help
help:
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# In a hurry: without debugging information, by a compiler that collects no garbage. With empty caches the control plane took 11 minutes of
# one processor so, standard library included.
# Each hundred packages that were compiled are a line.
SHELL := /bin/bash
HURRY := GOGC=off nice $(GO) build -v 2> >(awk '/ / { print } !/ / && ++n % 100 == 0 { print "  " n " packages compiled" } { fflush() }' >&2) \
	-gcflags=all=-dwarf=false
# building prints which of PROGRAMS a rule builds.
building = @printf '%s\n' $(PROGRAMS) | awk '$$0 == "$@" { print "building $(@F), program " NR " of $(words $(PROGRAMS))" }'
.SECONDEXPANSION:
$(CACHE)/%-$(KUBERNETES): $$(wildcard $$*/*)
	$(building)
	@mkdir -p $(@D)
	@cd $* && $(HURRY) -ldflags '-s -w -X $(STAMP).gitVersion=$(KUBERNETES) -X $(STAMP).gitMajor=1 -X $(STAMP).gitMinor=37' -o $@ .
	touch $@

.PHONY: build
build: $(BUILT) ## build the program into the user's cache, and say where
	@echo $(BUILT)

.PHONY: fairlead
fairlead:
	$(MAKE) -C ../.. build

# Bare `make` lists the verbs. Both `make lab` and `make test` do all their own set-up on a Debian machine with Go, as root.
GO ?= go
export CGO_ENABLED ?= 0
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
DEADCODE := golang.org/x/tools/cmd/deadcode@v0.52.0
HUGO := github.com/gohugoio/hugo@v0.165.0
# Functions that no command needs, but tests of several packages: those of packages for tests, of the oracle and of the clients that send
# packets, and a few that need what their package doesn't export. A test must need them all, but for MODULES, which those of other modules do.
SHARED := ^(conformance|verdict|sandbox/echo)/|test/[a-z]+\.go:|^source/source\.go:.* Kinds$$|^lab/(testbed/.* Leftovers|kubeproxy/.* Clean)$$
MODULES := ^sandbox/controlplane/.* Plane\.StartControllers$$
# Packages whose goroutines share state: tested again with the race detector, which needs a C compiler.
RACY := ./agent/*/ ./agent/*/*/ ./cni ./flowlog/record ./ipam ./reconcile/... ./source/... ./dataplane/health ./dataplane/httpserver ./dataplane/network/... \
	./dataplane/service/userspace ./kernel/child ./kernel/conntrack ./kernel/iptables ./kernel/netlink ./kernel/nftables ./kernel/sysctl \
	./lab/load ./lab/experiment/services ./sandbox ./sandbox/apiserver ./sandbox/daemon ./sandbox/echo

.PHONY: help
help:
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What `fairlead version` prints: the tag of a release, and the commit.
VERSIONS := -X main.release=$(shell git describe --tags --exact-match 2>/dev/null) \
	-X main.commit=$(shell git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null)

.PHONY: build
build: ## build bin/fairlead and bin/fairlead-cni
	$(GO) build -ldflags '$(VERSIONS)' -o bin/fairlead ./cmd/fairlead
	$(GO) build -trimpath -ldflags '-s -w' -o bin/fairlead-cni ./cmd/fairlead-cni
	$(if $(filter 0build,$(MAKELEVEL)$(MAKECMDGOALS)),@printf '%s\n' $(NEXT))

NEXT := 'Next:  bin/fairlead --help                           all commands' \
	'       sudo bin/fairlead sandbox up examples/shop    a cluster in a box, see docs/tutorials/quick-start.md' \
	'       sudo bin/fairlead lab run services --quick    what Services cost on this kernel, in four minutes'

ARCHS := amd64 arm64
.PHONY: binaries
binaries: $(ARCHS:%=bin/fairlead-linux-%) $(ARCHS:%=bin/fairlead-cni-linux-%)
bin/fairlead-linux-%: FORCE
	GOOS=linux GOARCH=$* $(GO) build -trimpath -buildvcs=auto -ldflags '-s -w $(VERSIONS)' -o $@ ./cmd/fairlead
bin/fairlead-cni-linux-%: FORCE
	GOOS=linux GOARCH=$* $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/fairlead-cni
FORCE:

.PHONY: image
image: binaries ## bin/fairlead-image.tar: a container image for ARCHS, without a daemon; BASE= puts it on another image, PUSH= sends it there
	cd deploy && $(GO) run -mod=mod ./image $(foreach a,$(ARCHS),--binary $a=../bin/fairlead-linux-$a) \
	  $(foreach a,$(ARCHS),--plugin $a=../bin/fairlead-cni-linux-$a) --base '$(BASE)' --tools=$(if $(BASE),false,true) \
	  --push '$(PUSH)' --revision "$$(git rev-parse HEAD)" --out ../bin/fairlead-image.tar \
	  --sbom ../bin/fairlead-image.spdx.json --created "$$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)"

.PHONY: manifests
manifests: ## print the chart's manifests, for kubectl: ARGS='--set apiServer.host=192.0.2.10'
	@cd deploy && $(GO) run -mod=mod ./render $(ARGS)

.PHONY: docs
docs: ## build the site of the documentation, with a search: bin/docs/index.html (the first time two minutes, to compile Hugo)
	rm -rf bin/docs
	$(GO) run $(HUGO) --config docs/site/hugo.toml --destination $(CURDIR)/bin/docs --noBuildLock --logLevel warn
	@echo bin/docs/index.html

.PHONY: lab
lab: build root ## measure on this machine: the experiment `services`, quick profile, about 4 minutes
	bin/fairlead lab run services --quick

.PHONY: lab-full
lab-full: build root ## the same with every block: for the night
	bin/fairlead lab run services

.PHONY: test
test: root packages vet ## every test: pure, in the kernel, with real packets, with the race detector
	$(GO) test -timeout 40m -parallel 6 -skip SecondKernel $$($(GO) list ./... | grep -v /sandbox/vm)
	CGO_ENABLED=1 $(GO) test -race -timeout 20m -skip 'SecondKernel|AreBounded' $(RACY)
	CGO_ENABLED=1 $(GO) test -race -timeout 20m -parallel 6 -skip 'SecondKernel|Conformance/(nftables|iptables|ebpf)' ./agent -worlds 3 -replacements 20
	$(GO) test -timeout 20m -p 1 ./sandbox/vm/...
	$(GO) test -timeout 45m -p 2 -run '^Test(In)?SecondKernel$$' ./agent ./agent/network/attach ./bpf/service ./kernel/ipvs ./dataplane/network/route ./dataplane/service/ebpf ./dataplane/service/ipvs
	$(GO) test -timeout 45m -run '^Test(ExactIn)?SecondKernel$$' ./test ./lab # as many machines at once as there are processors

# What needs no root: pure packages, and in a user namespace kernel wrappers and the mode userspace.
UNIT := . ./agent/escape ./agent/memory ./cmd/... ./cni ./inspect ./ipam ./agent/config ./dataplane/health ./dataplane/httpserver ./dataplane/maglev ./agent/event ./flowlog ./lab/chart ./lab/instructions \
	./lab/analysis ./lab/cluster ./lab/progress ./lab/report ./lab/result ./lab/stats ./model ./reachability ./reconcile ./resolve/... ./sandbox/apiserver ./sandbox/generate ./source/... ./verdict
ROOTLESS := ./kernel/netns ./kernel/nftables ./kernel/sockets ./kernel/sysctl ./dataplane/service/userspace
.PHONY: test-unit
test-unit: ## what needs no root: pure packages, kernel wrappers in a user namespace: two minutes with a warm build cache
	$(GO) test $(UNIT)
	unshare -rnm sh -c 'mount -t tmpfs none /run && ip link set lo up && $(GO) test -skip OverReadOnlyProc $(ROOTLESS)' # that one mounts /proc

.PHONY: test-slow
test-slow: root packages ## iptables and eBPF in the second kernel, eBPF in older ones, by as many emulated machines at once as there are processors: an hour or more
	$(GO) test -timeout 240m -v -run TestSlowSecondKernel ./test ./dataplane/service/ebpf

.PHONY: test-modes
test-modes: root packages ## every change of a running agent's mode, under clients that reuse ports: a minute
	$(GO) test -timeout 10m -count 1 -run TestModeChanges ./test -every-change-of nftables,ebpf,iptables-nft,iptables-legacy,userspace

BEFORE ?= $(shell git describe --tags --abbrev=0 2>/dev/null)
.PHONY: test-matrix
test-matrix: root packages ## every case and many random worlds of network policies on every pair of mode and policy engine, all cases over the pod network, drawn sources, more changes under traffic: the better part of an hour
	$(GO) test -timeout 90m -count 1 -run 'Polic(y|ies)|NetworkConformance|ChangeUnderTraffic|ForgedSources' ./agent -matrix -worlds 1000 -replacements 1000 -forged 2000

.PHONY: test-scale
test-scale: root packages ## 100,000 pods × 75,000 network policies through an agent into each policy engine, then 10,000 Services × 10: time and memory, some minutes
	$(GO) test -timeout 30m -count 1 -v -run Scale$$ ./test -scale-pods 100000 -scale-services 10000 -scale-rest 20s

.PHONY: memory-accept
memory-accept: ## measure the live heap by what made it, and commit to it: test/memory/testdata, which make test holds it to, and docs/measurements/memory.md
	$(GO) test -timeout 10m -count 1 ./test/memory -accept

.PHONY: exact-page
exact-page: build ## write docs/measurements/exact.md of the runs in RUNS, folders of `lab run --exact` and of runs by time
	bin/fairlead lab page $(RUNS) --out docs/measurements/exact.md

.PHONY: exact-accept
exact-accept: root packages ## count the instructions of connections and commit to them: lab/testdata/exact.json, which make test holds them to
	$(GO) test -timeout 20m -count 1 -run TestExactInSecondKernel ./lab -accept-exact

.PHONY: test-upgrade
test-upgrade: root packages ## upgrade from another build and back, under load: BEFORE=COMMIT (default: the last tag), a minute
	rm -rf bin/before && git worktree prune && git worktree add --force --detach bin/before $(BEFORE)
	cd bin/before && $(GO) build -o ../fairlead-before ./cmd/fairlead
	git worktree remove --force bin/before
	$(GO) test -timeout 10m -count 1 -run TestUpgradeAndDowngrade ./test -before $(CURDIR)/bin/fairlead-before

.PHONY: test-kubeproxy
test-kubeproxy: root packages ## the lab's subjects kube-proxy and kube-router: builds the real ones (minutes) and runs them
	$(MAKE) -C test/kubeproxy test

.PHONY: test-endurance
test-endurance: root packages ## 110 pods on a node, 30 more a second come and go, the agent killed every 5 s: ten minutes
	$(GO) test -timeout 30m -count 1 -v -run TestPodsComeAndGoUnderKills ./test -endure 10m

.PHONY: test-cluster
test-cluster: root packages ## the agent against a real etcd, kube-apiserver and EndpointSlice controller: builds them once (minutes), then takes one or two
	$(MAKE) -C test/cluster test

.PHONY: test-cluster-nodes
test-cluster-nodes: root packages ## two nodes with real kubelets and containers on the agent's network: builds them once (many minutes), then takes one or two
	$(MAKE) -C test/cluster test-containerd ARGS=
	$(MAKE) -C test/cluster test-nodes

.PHONY: test-containerd
test-containerd: root packages ## the CNI plugin and the agent with a real containerd, without Kubernetes: builds it once (minutes), then takes less than one
	$(MAKE) -C test/cluster test-containerd

.PHONY: cluster
cluster: root packages ## a real Kubernetes cluster of three nodes on this machine: builds its programs once (minutes), then starts it: ARGS="--nodes 2"
	$(MAKE) -C test/cluster programs $(if $(filter bridge,$(ARGS)),comparison)
	bin/fairlead cluster up $(ARGS)

.PHONY: test-deploy
test-deploy: root packages binaries ## the Helm chart, the image, and both together on a real control plane (built once, minutes): two minutes
	cd deploy && $(GO) vet -mod=mod ./... && $(GO) test -mod=mod -count 1 -timeout 5m ./...
	$(MAKE) -C test/cluster test ARGS="-run 'TestDeploy'"

.PHONY: vet
vet: ## gofmt, vet, staticcheck, and functions that nothing needs
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "make vet: run gofmt -w on these files" >&2; exit 1; }
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	@shipped=$$($(GO) run $(DEADCODE) ./...) && tested=$$($(GO) run $(DEADCODE) -test ./...) || exit 1; \
	dead=$$({ echo "$$shipped" | grep -vE '$(SHARED)'; echo "$$tested"; } | grep -vE '^$$|$(MODULES)' | sort -u); \
	[ -z "$$dead" ] || { echo "$$dead"; echo "make vet: delete these functions, or move them into the files of the tests that need them" >&2; exit 1; }

.PHONY: generated
generated: PACKAGES = clang llvm libbpf-dev
generated: root packages ## compile the eBPF programs anew: their objects must come out byte for byte (clang 14 of Debian 12; half a minute)
	$(GO) generate ./bpf/...
	git diff --exit-code --stat -- bpf

.PHONY: fuzz
fuzz: ## each fuzz target for a minute
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime 60s -fuzzminimizetime 1s $$p || exit 1; done; done

.PHONY: bench
bench: root ## Go benchmarks of the data plane, the resolver, the loop and the source
	$(GO) test -run '^$$' -bench . ./dataplane/... ./resolve/... ./reconcile/... ./source/...

PACKAGES := nftables iproute2 iptables ipset gcc libc6-dev qemu-system-x86 qemu-system-common kmod
test-cluster test-cluster-nodes test-containerd test-deploy cluster: PACKAGES += runc
.PHONY: packages
packages: # Debian packages that tests need: nft and ip look from outside, gcc serves the race detector, qemu the second kernel
	@missing=; for p in $(PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then echo "installing$$missing"; \
	  apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $$missing >/dev/null; fi

.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo "make: the kernel is part of this: run as root (sudo make ...)" >&2; exit 1; }

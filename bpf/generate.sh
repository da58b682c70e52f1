#!/bin/sh
# Compiles NAME.c of the folder NAME in which it is called into an object and Go types, and renews the digests of all
# sources and objects: sh ../generate.sh [-type STRUCT]...
# The objects, and so the packages (the constraint of *_bpfel.go), are for little-endian machines alone: no image is built
# for a big-endian one (ARCHS of the Makefile), and nothing tests the programs there.
set -eu
name=$(basename "$PWD")
go run github.com/cilium/ebpf/cmd/bpf2go@v0.22.0 -go-package "$name" -output-stem "$name" -target bpfel "$@" \
	"$name" "$name.c" -- -O2 -g -Wall -Werror -mcpu=v3 -I.. \
	-idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
cd ..
export LC_ALL=C
{
	cat *.h */*.[ch] | sha256sum | sed s/-/sources/
	sha256sum */*.o
	clang --version | head -n1
} >objects.sum

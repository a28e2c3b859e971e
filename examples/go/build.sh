#!/bin/sh
# Builds build/generate with Debian's packages alone, without modules or a network:
#   apt-get install golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev \
#       protobuf-compiler protoc-gen-go-1-5 protoc-gen-go-grpc
# It was not tried with modules.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/build}
stubs=pagewire.example/pagewire/v1
mkdir -p "$build/src/$stubs" "$build/src/generate"
protoc -I"$here/../../protos" \
    --go_out="$build/src" --go_opt="Mpagewire/v1/common.proto=$stubs" \
    --go_opt="Mpagewire/v1/inference.proto=$stubs" \
    --go-grpc_out="$build/src" --go-grpc_opt="Mpagewire/v1/common.proto=$stubs" \
    --go-grpc_opt="Mpagewire/v1/inference.proto=$stubs" \
    pagewire/v1/common.proto pagewire/v1/inference.proto
cp "$here/main.go" "$build/src/generate/"
GO111MODULE=off GOFLAGS= GOPATH="$build:/usr/share/gocode" \
    go build -o "$build/generate" generate

#!/usr/bin/env bash
# Fails where the protos break clients of an earlier commit: the point where this
# branch left origin/main, else the commit before this one. Uses no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=$(git merge-base HEAD origin/main 2>/dev/null || true)
if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD 2>/dev/null)" ]; then
    base=$(git rev-parse --verify --quiet 'HEAD~1^{commit}' || true)
fi
if [ -z "$base" ] || ! git cat-file -e "$base:protos/buf.yaml" 2>/dev/null; then
    echo "buf breaking: no earlier protos to compare with"
    exit 0
fi
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" protos | tar -x -C "$before"
buf breaking protos --against "$before/protos"
echo "buf breaking: compatible with ${base:0:12}"

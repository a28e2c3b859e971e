#!/bin/sh
# By reflection, so without .proto files.
set -eu
address=${PAGEWIRE_ADDRESS:-127.0.0.1:50051}

grpcurl -plaintext "$address" list
grpcurl -plaintext "$address" describe pagewire.v1.SamplingParams

grpcurl -plaintext -d '{"prompt": "Once upon a time", "sampling_params": {"max_tokens": 16}}' \
    "$address" pagewire.v1.InferenceService/Generate

grpcurl -plaintext -max-time 60 -d '{
    "chat": {"messages": [{"role": "user", "content": "Name three colours."}]},
    "sampling_params": {"temperature": 0, "max_tokens": 16}}' \
    "$address" pagewire.v1.InferenceService/GenerateStream

grpcurl -plaintext "$address" pagewire.v1.ModelService/ListModels
grpcurl -plaintext -d '{"service": "pagewire.v1.InferenceService"}' \
    "$address" grpc.health.v1.Health/Check

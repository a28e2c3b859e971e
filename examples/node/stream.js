// A stream over gRPC, the failure of one, and a cancel. The protos are read at run time.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const address = process.env.PAGEWIRE_ADDRESS ?? "127.0.0.1:50051";
const root = fileURLToPath(new URL("../../", import.meta.url));

const definition = protoLoader.loadSync("pagewire/v1/inference.proto", {
  includeDirs: [`${root}protos`],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pagewire.v1;

const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.service_config": readFileSync(`${root}deploy/service_config.json`, "utf8"),
});

// Calls take a deadline, as a date.
const inSeconds = (seconds) => ({ deadline: new Date(Date.now() + 1000 * seconds) });

async function generate() {
  const call = client.GenerateStream(
    {
      chat: { messages: [{ role: "user", content: "Name three colours." }] },
      sampling_params: { temperature: 0, max_tokens: 32 },
    },
    inSeconds(60),
  );
  for await (const response of call) {
    if (response.frame === "delta") process.stdout.write(response.delta.text);
    else console.log(`\n${response.final.outputs[0].finish_reason}`);
  }
}

async function fail() {
  const call = client.GenerateStream({ prompt: "x", sampling_params: { top_p: 7 } }, inSeconds(60));
  try {
    for await (const _ of call);
  } catch (error) {
    console.log(`${grpc.status[error.code]}: ${error.details}`);
  }
}

async function cancel() {
  const call = client.GenerateStream(
    { prompt: "Count:", sampling_params: { ignore_eos: true } },
    inSeconds(60),
  );
  try {
    for await (const _ of call) call.cancel();
  } catch (error) {
    console.log(grpc.status[error.code]);
  }
}

await generate();
await fail();
await cancel();
client.close();

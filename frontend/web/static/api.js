// Calls to the server that this page came from.

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function getJson(path, key, signal) {
  const response = await reach(path, { headers: authorization(key), signal, cache: "no-store" });
  await check(response);
  return response.json();
}

/** Yields { text, tokens, model, finish } for each event of a chat completion; `tokens` counts
 *  the output so far. Throws ApiError, also where the stream breaks off before its end. */
export async function* chat(body, key, signal) {
  const response = await reach("/v1/chat/completions", {
    method: "POST",
    headers: { ...authorization(key), "content-type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  await check(response);
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
      const choice = event.choices[0];
      yield {
        text: choice?.delta?.content ?? "",
        tokens: event.usage?.completion_tokens ?? 0,
        model: event.model,
        finish: choice?.finish_reason ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.", 0, "lost");
  }
  throw new ApiError("The answer broke off.", 0, "lost");
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
}

async function check(response) {
  if (response.ok) return;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // No answer of the server's own: a proxy's page, say.
  }
  const message = told?.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(message, response.status, told?.code ?? "");
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const event = rest.slice(0, end);
        rest = rest.slice(end + 2);
        if (event.startsWith("data: ")) yield event.slice("data: ".length);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

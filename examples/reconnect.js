// Stream a chat, and continue it where it stopped if the connection breaks off.
//
//     node examples/reconnect.js "What does itertools.chain do?" [http://127.0.0.1:8000]
//
// Needs Node.js 18 or newer and a server: `raydix serve`. `chat` runs in browsers, too, if the server's
// `ingresses.cors_origins` has the page's origin. Each event has an id, because the request accepts
// text/event-stream. The same request with the header Last-Event-ID continues after that event.

const PASSING = ["unavailable", "overloaded", "aborted", "engine_lost"]; // the same request may succeed later

/** Yield an answer's text, over as many connections as it takes. */
async function* chat(url, body) {
  const headers = { "content-type": "application/json", accept: "text/event-stream" };
  for (;;) {
    try {
      const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
      if (!answer.ok && ![429, 502, 503].includes(answer.status)) throw new Error(await answer.text());
      for await (const { id, data } of answer.ok ? events(answer.body) : []) {
        if (data === "[DONE]") return;
        const { error, choices } = JSON.parse(data);
        if (error && !PASSING.includes(error.code)) throw new Error(error.message);
        if (error) break;
        headers["last-event-id"] = id;
        for (const choice of choices) yield choice.delta.content ?? "";
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch reports a broken connection as a TypeError
    }
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

/** Yield the fields of each event that has arrived completely. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (let part; !(part = await reader.read()).done; ) {
    const complete = (unread + part.value).split("\n\n");
    unread = complete.pop();
    for (const event of complete) yield Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s)));
  }
}

async function main(question, url = "http://127.0.0.1:8000") {
  const models = await (await fetch(`${url}/v1/models`)).json();
  const messages = [{ role: "user", content: question }];
  const body = { model: models.data[0].id, messages, temperature: 0, stream: true };
  for await (const text of chat(`${url}/v1/chat/completions`, body)) process.stdout.write(text);
  console.log();
}

if (typeof process !== "undefined") main(...process.argv.slice(2));

// What a program does with the `openai` package; prints what it saw as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { WHO, PARIS, DESCRIBE, SCHEMA, BASE_URL } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const user = (content) => ({ role: "user", content });
const City = z.object({ name: z.string(), population: z.number().int(), rivers: z.array(z.string()) });

const parts = {
  async chat() {
    const first = await client.chat.completions.create({ model: "plain", messages: [user(WHO)] });
    const { message } = first.choices[0];
    const messages = [user(WHO), message, user("Sorry?")];
    const second = await client.chat.completions.create({ model: "plain", messages });
    return [message.content, second.choices[0].message.content];
  },
  async stream() {
    const stream = await client.chat.completions.create({
      model: "plain", messages: [user(WHO)], stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text, tokens: usage.completion_tokens };
  },
  async tools() {
    const asked = [];
    const get_weather = {
      name: "get_weather", parse: JSON.parse, parameters: JSON.parse(SCHEMA),
      function: ({ city }) => { asked.push(city); return "21 degrees and sunny"; },
    };
    const runner = client.chat.completions.runTools({
      model: "agent", messages: [user(PARIS)], tools: [{ type: "function", function: get_weather }], stream: true,
    });
    return { answer: (await runner.finalContent()).trim(), asked };
  },
  async parsed() {
    const answer = await client.chat.completions.parse({
      model: "plain", messages: [user(DESCRIBE)], response_format: zodResponseFormat(City, "city"),
    });
    return answer.choices[0].message.parsed;
  },
  async responses() {
    const tools = [{ type: "function", name: "get_weather", parameters: JSON.parse(SCHEMA), strict: true }];
    const stream = client.responses.stream({ model: "agent", input: PARIS, tools });
    const kinds = [];
    for await (const event of stream) kinds.push(event.type);
    const first = await stream.finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: "21 degrees and sunny" };
    const last = await client.responses.create({
      model: "agent", input: [result], previous_response_id: first.id, tools,
    });
    return { first: kinds[0], last: kinds.at(-1), answer: last.output_text.trim() };
  },
  async errors() {
    const error = await client.chat.completions
      .create({ model: "plain", messages: [user(WHO)], temperature: -1 })
      .catch((caught) => caught);
    return { kind: error.constructor.name, status: error.status, param: error.param };
  },
};

console.log(JSON.stringify(await parts[process.argv[2]]()));

// What a program does with the AI SDK; prints what it saw as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { WHO, PARIS, DESCRIBE, BASE_URL } = process.env;
const compatible = createOpenAICompatible({
  name: "raydix", baseURL: BASE_URL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const responses = createOpenAI({ baseURL: BASE_URL, apiKey: "none" });
const City = z.object({ name: z.string(), population: z.number().int(), rivers: z.array(z.string()) });

async function agent(model) {
  const asked = [];
  const get_weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { asked.push(city); return "21 degrees and sunny"; },
  });
  const result = streamText({ model, prompt: PARIS, tools: { get_weather }, stopWhen: stepCountIs(4), maxRetries: 0 });
  const answer = (await result.text).trim();
  const thoughts = (await result.steps).map((step) => (step.reasoningText ?? "").trim());
  return { answer, asked, thoughts };
}

const parts = {
  async chat() {
    const { text, usage } = await generateText({ model: compatible("plain"), prompt: WHO, maxRetries: 0 });
    return { text, tokens: usage.outputTokens };
  },
  agent: () => agent(compatible("agent")),
  responses: () => agent(responses("agent")),
  async parsed() {
    const output = Output.object({ schema: City });
    const { output: city } = await generateText({ model: compatible("plain"), prompt: DESCRIBE, output, maxRetries: 0 });
    return city;
  },
};

console.log(JSON.stringify(await parts[process.argv[2]]()));

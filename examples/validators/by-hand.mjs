// A validator written by hand: one ES module without any package. It speaks the lines of docs/requests.md ("Programs of the request").
import { readFile } from "node:fs/promises";

const print = (word, value) => process.stdout.write(`${word}=${JSON.stringify(value)}\n`);
const text = (value) => ({ text: String(value), format: "text", state: "captured", truncated: false });

// What `prepare` has returned, and what the agent said last.
const { total } = JSON.parse(process.env.SPHYNX_PREPARE_VALUE);
const answer = await readFile(process.env.SPHYNX_ANSWER_FILE, "utf8");
const written = (await readFile("total.txt", "utf8").catch(() => "")).trim();

// In the order of the manifest: `code:0`, `code:1`.
const checks = [
  { passed: written === String(total), message: "total.txt holds the total", output: text(written) },
  { passed: answer.includes(String(total)), message: "the agent says the total", output: text(answer) },
];
for (const [index, check] of checks.entries()) {
  print("SPHYNX_VALIDATION", {
    id: `code:${index}`,
    status: check.passed ? "passed" : "failed",
    message: check.message,
    output: check.output,
  });
}
print("SPHYNX_VALIDATOR_RESULT", { passed: checks.every((check) => check.passed) });

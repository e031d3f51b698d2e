// src/checks.mjs
import { readFileSync } from "node:fs";
var wroteTheTotal = ({ prepared }) => {
  const written = readFileSync("total.txt", "utf8").trim();
  return { passed: written === String(prepared.total), message: `total.txt holds ${written}` };
};
var readBeforeWriting = ({ turns }) => {
  const [first] = turns();
  const place = (test) => first.events.findIndex(test);
  const read2 = place((event) => event._tag === "command" && event.command.includes("list.txt"));
  const wrote = place((event) => event._tag === "fileChange");
  return { passed: read2 !== -1 && read2 < wrote, message: `read at ${read2}, wrote at ${wrote}` };
};

// src/protocol.mjs
import { readFileSync as readFileSync2 } from "node:fs";
var print = (word, value) => process.stdout.write(`${word}=${JSON.stringify(value)}
`);
var captured = (value) => ({
  text: typeof value === "string" ? value : JSON.stringify(value),
  format: typeof value === "string" ? "text" : "json",
  state: "captured",
  truncated: false
});
var read = (variable) => readFileSync2(process.env[variable], "utf8");
var context = {
  answer: () => read("SPHYNX_ANSWER_FILE"),
  transcript: () => read("SPHYNX_TRANSCRIPT_FILE"),
  turns: () => JSON.parse(read("SPHYNX_TURNS_FILE")),
  prepared: JSON.parse(process.env.SPHYNX_PREPARE_VALUE)
};
var run = async (checks) => {
  let passed = true;
  for (const [index, check] of checks.entries()) {
    const record = { id: `code:${index}`, name: check.name, status: "running", startedAt: Date.now() };
    print("SPHYNX_VALIDATION", record);
    try {
      const verdict = await check(context);
      passed &&= verdict.passed;
      Object.assign(record, { status: verdict.passed ? "passed" : "failed", message: verdict.message, output: captured(verdict) });
    } catch (error) {
      passed = false;
      process.exitCode = 1;
      Object.assign(record, { status: "error", message: String(error), error: captured(String(error?.stack ?? error)) });
    }
    print("SPHYNX_VALIDATION", { ...record, durationMs: Date.now() - record.startedAt });
  }
  print("SPHYNX_VALIDATOR_RESULT", { passed });
};

// src/index.mjs
await run([wroteTheTotal, readBeforeWriting]);

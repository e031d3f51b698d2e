// The lines of a validator, in a module that any number of checks can share.
import { readFileSync } from "node:fs";

const print = (word, value) => process.stdout.write(`${word}=${JSON.stringify(value)}\n`);

const captured = (value) => ({
  text: typeof value === "string" ? value : JSON.stringify(value),
  format: typeof value === "string" ? "text" : "json",
  state: "captured",
  truncated: false,
});

const read = (variable) => readFileSync(process.env[variable], "utf8");

/** What every check gets. */
const context = {
  answer: () => read("SPHYNX_ANSWER_FILE"),
  transcript: () => read("SPHYNX_TRANSCRIPT_FILE"),
  turns: () => JSON.parse(read("SPHYNX_TURNS_FILE")),
  prepared: JSON.parse(process.env.SPHYNX_PREPARE_VALUE),
};

/** Runs all checks in their order, also behind one that fails or throws. */
export const run = async (checks) => {
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

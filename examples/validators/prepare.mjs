// A prepare step: makes the numbers that the agent is to add up, and tells only the checks what they come to.
import { mkdir, readFile, writeFile } from "node:fs/promises";

if (process.env.SPHYNX_CACHE_RESTORED === "false") {
  // Something expensive would be made here; the case's `cache` brings it back in later trials.
  await mkdir("numbers", { recursive: true });
  await writeFile("numbers/list.txt", "12\n7\n23\n");
}
const numbers = (await readFile("numbers/list.txt", "utf8")).trim().split("\n").map(Number);
const total = numbers.reduce((sum, number) => sum + number, 0);
process.stdout.write(`SPHYNX_PREPARE_RESULT=${JSON.stringify({ total })}\n`);

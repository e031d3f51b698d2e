// The checks themselves.
import { readFileSync } from "node:fs";

export const wroteTheTotal = ({ prepared }) => {
  const written = readFileSync("total.txt", "utf8").trim();
  return { passed: written === String(prepared.total), message: `total.txt holds ${written}` };
};

export const readBeforeWriting = ({ turns }) => {
  const [first] = turns();
  const place = (test) => first.events.findIndex(test);
  const read = place((event) => event._tag === "command" && event.command.includes("list.txt"));
  const wrote = place((event) => event._tag === "fileChange");
  return { passed: read !== -1 && read < wrote, message: `read at ${read}, wrote at ${wrote}` };
};

// Never called: esbuild leaves it out.
export const unused = () => ({ passed: false, message: "this is not in the bundle" });

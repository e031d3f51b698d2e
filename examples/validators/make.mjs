// Puts the programs of this folder into ../validator.json: `node make.mjs`.
import { readFileSync, writeFileSync } from "node:fs";

const read = (path) => readFileSync(new URL(path, import.meta.url), "utf8");
const names = (...names) => names.map((name, index) => ({ index, name }));

const shared = {
  variables: { file: "numbers/list.txt" },
  cache: { key: "numbers-v1", path: "numbers" },
  prepare: { name: "numbers", source: read("prepare.mjs") },
  timeoutMs: 60_000,
};
const request = {
  suite: { id: "validators", name: "Checks as programs", prompt: "Add up {{ file }}, write the total into total.txt, and say it." },
  cases: [
    {
      id: "checked-by-hand",
      ...shared,
      validator: { name: "by-hand", manifest: names("wroteTheTotal", "saysTheTotal"), source: read("by-hand.mjs") },
    },
    {
      id: "checked-by-a-bundle",
      ...shared,
      validator: {
        name: "bundled",
        manifest: names("wroteTheTotal", "readBeforeWriting"),
        source: read("bundled/checks.mjs"),
        sourceFiles: ["checks", "index", "protocol"].map((name) => ({
          path: `src/${name}.mjs`,
          content: read(`bundled/src/${name}.mjs`),
        })),
      },
    },
  ],
  variants: [
    {
      harness: "command",
      model: "example",
      profile: { name: "adder", files: { "home/agent.sh": read("agent.sh") }, run: 'env -u BASH_ENV bash "$SPHYNX_HOME/agent.sh"' },
    },
  ],
  trials: 2,
};
writeFileSync(new URL("../validator.json", import.meta.url), `${JSON.stringify(request, null, 2)}\n`);

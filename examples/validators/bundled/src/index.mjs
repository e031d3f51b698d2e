import { readBeforeWriting, wroteTheTotal } from "./checks.mjs";
import { run } from "./protocol.mjs";

await run([wroteTheTotal, readBeforeWriting]);

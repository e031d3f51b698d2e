//! The Lua scripts: each one atomic step, each with bounded work, each with all its keys given.
//!
//! Whatever changes the cell compares the owner's epoch and nonce first. Numbers in them stay exact up to 2^53, far beyond any
//! position.

use std::sync::LazyLock;

use redis::{Cmd, cmd};

/// A script and the hash by which a server knows it.
pub(super) struct Script {
    text: &'static str,
    hash: LazyLock<String>,
}

macro_rules! script {
    ($(#[$attribute:meta])* $name:ident, $text:expr) => {
        $(#[$attribute])*
        pub(super) static $name: Script = Script { text: $text, hash: LazyLock::new(|| redis::Script::new($text).get_hash().to_owned()) };
    };
}

impl Script {
    /// Teaches it to a server.
    pub(super) fn load(&self) -> Cmd {
        cmd("SCRIPT").arg("LOAD").arg(self.text).clone()
    }

    /// Runs it, where the server knows it.
    pub(super) fn run(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        cmd("EVALSHA")
            .arg(self.hash.as_str())
            .arg(keys.len())
            .arg(keys)
            .arg(arguments)
            .clone()
    }
}

script!(
    /// Keys owner, log; epoch, nonce, expected position and chain, new position and chain, group, raw chain before it, writer.
    /// 1: written. 2: it was there already, written by the same owner; stored once more, so that a `WAIT` behind it counts.
    APPEND,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'position', 'chain')
if owner[1] == ARGV[1] and owner[2] == ARGV[2] then
  if owner[3] == ARGV[3] and owner[4] == ARGV[4] then
    redis.call('XADD', KEYS[2], ARGV[5] .. '-0', 'g', ARGV[7], 'p', ARGV[8], 'o', ARGV[9])
    redis.call('HSET', KEYS[1], 'position', ARGV[5], 'chain', ARGV[6])
    return {1}
  end
  if owner[3] == ARGV[5] and owner[4] == ARGV[6] then
    redis.call('HSET', KEYS[1], 'position', ARGV[5], 'chain', ARGV[6])
    return {2}
  end
end
return {0, owner[1] or '', owner[2] or '', owner[3] or '', owner[4] or ''}
"
);

script!(
    /// Keys owner, lease; nonce, address, time to live in ms, history for a new cell, history to give up (or empty).
    /// The epoch and what it begins with, or 0 where somebody holds the lease.
    TAKE,
    r"
if redis.call('EXISTS', KEYS[2]) == 1 then return {0} end
local owner = redis.call('HMGET', KEYS[1], 'position', 'chain', 'history')
local position, chain, history = owner[1] or '0', owner[2] or string.rep('0', 32), owner[3]
if not history or history == ARGV[5] then history = ARGV[4] end
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'address', ARGV[2], 'position', position, 'chain', chain, 'history', history)
redis.call('SET', KEYS[2], epoch .. ':' .. ARGV[1], 'PX', ARGV[3])
return {1, tostring(epoch), position, chain, history}
"
);

script!(
    /// Keys owner, lease; token, time to live in ms. 1 and the log's end where the lease is still ours.
    RENEW,
    r"
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return {0} end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local owner = redis.call('HMGET', KEYS[1], 'position', 'history')
return {1, owner[1] or '0', owner[2] or ''}
"
);

script!(
    /// Key lease; token. Gives up the lease, if it is ours.
    RELEASE,
    r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"
);

script!(
    /// Keys owner, lease, log; first position, most entries, bytes after which no further entry is taken.
    /// The owner's fields, whether the lease lives, and entries.
    READ,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'address', 'history', 'position', 'chain')
for i = 1, 5 do owner[i] = owner[i] or '' end
local entries, bytes, from = {}, 0, ARGV[1] .. '-0'
while #entries < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', KEYS[3], from, '+', 'COUNT', 1)[1]
  if not entry then break end
  for i = 2, #entry[2], 2 do bytes = bytes + #entry[2][i] end
  entries[#entries + 1] = entry
  from = '(' .. entry[1]
end
return {owner, redis.call('EXISTS', KEYS[2]), entries}
"
);

script!(
    /// Key log; position, bytes of a group's header. What begins and what is at that position, cut down to what a chain is made of.
    PROBE,
    r"
local function short(entry)
  if not entry then return {} end
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'g' then entry[2][i + 1] = string.sub(entry[2][i + 1], 1, tonumber(ARGV[2])) end
  end
  return entry
end
local id = ARGV[1] .. '-0'
return {short(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]), short(redis.call('XRANGE', KEYS[1], id, id)[1])}
"
);

script!(
    /// Key owner; old history, new history. Says in Redis that the old one ended, unless somebody has.
    NEW_HISTORY,
    r"
if redis.call('HGET', KEYS[1], 'history') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'history', ARGV[2])
return 1
"
);

script!(
    /// Keys owner, log, snapshots; epoch, nonce, position, most entries. Drops whole nodes of entries that the older snapshot
    /// reflects. How many, or -1 where we are not the owner.
    CUT,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return -1 end
local older = tonumber(redis.call('HGET', KEYS[3], 'older') or '0')
local limit = math.min(tonumber(ARGV[3]), older)
if limit < 1 then return 0 end
return redis.call('XTRIM', KEYS[2], 'MINID', '~', string.format('%.0f-0', limit + 1), 'LIMIT', ARGV[4])
"
);

script!(
    /// Keys owner, snapshots, new snapshot, the one that an owner left unfinished (or the new one); epoch, nonce, position.
    /// 1: go on. 2: it is there already. 0: not the owner.
    SNAPSHOT_BEGIN,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return 0 end
if redis.call('HGET', KEYS[2], 'newest') == ARGV[3] then return 2 end
redis.call('UNLINK', KEYS[3], KEYS[4])
redis.call('HSET', KEYS[2], 'pending', ARGV[3])
return 1
"
);

script!(
    /// Keys owner, new snapshot; epoch, nonce, number of the chunk, chunk. 0: not the owner.
    SNAPSHOT_CHUNK,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return 1
"
);

script!(
    /// Keys owner, snapshots, new snapshot, the one to drop (or the new one); epoch, nonce, position, number of chunks, position of
    /// the older one (or empty), whether the newest so far is whole (1) and becomes the older one, or is dropped itself (0). Makes it
    /// the newest. 1: done. 0: not the owner. -1: not all of it is there, or another was saved.
    SNAPSHOT_END,
    r"
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return 0 end
local kept = redis.call('HMGET', KEYS[2], 'newest', 'older')
if kept[1] == ARGV[3] then return 1 end
if redis.call('HLEN', KEYS[3]) ~= tonumber(ARGV[4]) or (kept[2] or '') ~= ARGV[5] then return -1 end
redis.call('HSET', KEYS[2], 'newest', ARGV[3])
if kept[1] and ARGV[6] == '1' then redis.call('HSET', KEYS[2], 'older', kept[1]) end
redis.call('HDEL', KEYS[2], 'pending')
if KEYS[4] ~= KEYS[3] then redis.call('UNLINK', KEYS[4]) end
return 1
"
);

#[cfg(test)]
mod tests {
    use super::*;

    /// catalogue 47: Redis serves nobody else while a script runs, so none may do work that grows with what is stored.
    #[test]
    fn every_script_does_bounded_work() {
        let scripts = [
            ("APPEND", &APPEND),
            ("TAKE", &TAKE),
            ("RENEW", &RENEW),
            ("RELEASE", &RELEASE),
            ("READ", &READ),
            ("PROBE", &PROBE),
            ("NEW_HISTORY", &NEW_HISTORY),
            ("CUT", &CUT),
            ("SNAPSHOT_BEGIN", &SNAPSHOT_BEGIN),
            ("SNAPSHOT_CHUNK", &SNAPSHOT_CHUNK),
            ("SNAPSHOT_END", &SNAPSHOT_END),
        ];
        let defined = include_str!("scripts.rs").lines().filter(|line| line.trim() == "script!(").count();
        assert_eq!(defined, scripts.len(), "a script is missing in this list");
        // What costs the same however much is stored; UNLINK frees elsewhere.
        let constant = [
            "HMGET", "HGET", "HSET", "HDEL", "HLEN", "HINCRBY", "GET", "SET", "DEL", "EXISTS", "PEXPIRE", "XADD", "UNLINK",
        ];
        for (name, script) in scripts {
            for call in script.text.split("redis.call(").skip(1) {
                let arguments = call.split(')').next().unwrap_or_default();
                let command = arguments.split('\'').nth(1).unwrap_or_default();
                let bounded = match command {
                    // One entry, by a count or by its id.
                    "XRANGE" => arguments.contains("'COUNT', 1") || arguments.ends_with("id, id"),
                    "XTRIM" => call.contains("'LIMIT', ARGV"),
                    _ => constant.contains(&command),
                };
                assert!(bounded, "{name}: {arguments}");
            }
            // Loops go over what a constant bounds, or over what the arguments do.
            for line in script.text.lines().filter(|line| line.contains("while ") || line.contains("for ")) {
                let bounded = [
                    "< tonumber(ARGV[2])",
                    "for i = 1, 5 do",
                    "for i = 2, #entry[2], 2 do",
                    "for i = 1, #entry[2], 2 do",
                ];
                assert!(bounded.iter().any(|bound| line.contains(bound)), "{name}: {line}");
            }
        }
    }
}

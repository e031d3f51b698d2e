//! The model as a simulated person: a line of the system prompt, or of what it was told first, holds the replies.
//!
//! `PERSON: first reply | second reply | <<DONE>>`. What opened the conversation is no reply of the model's, though a chat is told it as if it
//! were: the first of the assistant's messages does not count where the system prompt holds the replies. An agent's session is told so far what
//! was said in a line of JSON, `[{"you": …}, {"agent": …}, …]`; its own answers come on top. A reply may be one directive of
//! [`script`](crate::script) (`RUN touch x`, `FAULT m500`); after the last one it is `<<DONE>>`.

use serde_json::Value;

use crate::exchange::{Exchange, Item};

/// The word that ends a conversation.
const DONE: &str = "<<DONE>>";
const MARK: &str = "PERSON:";

/// What the person was told, and what it says now; `None` where the model plays nobody.
pub(crate) fn reply(exchange: &Exchange) -> Option<(&str, String)> {
    let answers = |items: &[Item]| items.iter().filter(|item| matches!(item, Item::Assistant(_))).count();
    let (brief, said) = match exchange.system.contains(MARK) {
        true => (exchange.system.as_str(), answers(&exchange.items).saturating_sub(1)),
        false => {
            let told = |item: &Item| matches!(item, Item::User(text) if text.contains(MARK));
            let at = exchange.items.iter().position(told)?;
            // Some agents put words into the model's mouth before that.
            let answers = answers(&exchange.items[at..]);
            let Item::User(brief) = &exchange.items[at] else { return None };
            (brief.as_str(), answers + said_before(brief).saturating_sub(1))
        }
    };
    let (_, script) = brief.split_once(MARK)?;
    let script = script.lines().next().unwrap_or_default();
    let reply = script.split('|').nth(said).unwrap_or(DONE);
    Some((brief, reply.trim().to_owned()))
}

/// How often the person has spoken, as a new session is told.
fn said_before(brief: &str) -> usize {
    let lines = brief.lines().filter(|line| line.starts_with('['));
    let mut lists = lines.filter_map(|line| serde_json::from_str::<Vec<Value>>(line).ok());
    lists
        .next()
        .map_or(0, |list| list.iter().filter(|said| said["you"].is_string()).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(system: &str, items: &[Item], expected: Option<&str>) {
        let exchange = Exchange {
            system: system.into(),
            items: items.to_vec(),
            ..Exchange::default()
        };
        assert_eq!(reply(&exchange).map(|(_, reply)| reply).as_deref(), expected, "{items:?}");
    }

    #[test]
    fn replies_in_their_order() {
        let user = |text: &str| Item::User(text.into());
        let model = |text: &str| Item::Assistant(text.into());
        let brief = "You are a customer.\nBrief: PERSON: a red one | in May | <<DONE>>\nBe short.";
        let opened = [user("Hello!"), model("Sell me a bike")];
        let then = |items: &[Item]| [&opened, items].concat();
        check("be good", &then(&[user("hello")]), None);
        check(brief, &then(&[user("Which colour?")]), Some("a red one"));
        check(
            brief,
            &then(&[user("Which colour?"), model("a red one"), user("When?")]),
            Some("in May"),
        );
        let all = [
            user("?"),
            model("a red one"),
            user("?"),
            model("in May"),
            user("Ordered."),
            model("<<DONE>>"),
            user("?"),
        ];
        check(brief, &then(&all[..5]), Some(DONE));
        check(brief, &then(&all), Some(DONE));
        check("PERSON: | x", &[user("?")], Some(""));
        check("PERSON: FAULT m500 | x", &[user("?")], Some("FAULT m500"));
        // What the agent says is no brief.
        check(brief, &then(&[user("PERSON: I am the agent")]), Some("a red one"));
        // An agent's session: the brief is what it was told first, with what was said.
        let told = |said: &str| user(&format!("{brief}\nSo far:\n{said}\nReply."));
        let first = told(r#"[{"you":"Sell me a bike"},{"agent":"Which colour?"}]"#);
        check("be good", std::slice::from_ref(&first), Some("a red one"));
        check(
            "be good",
            &[user("<env>"), first, model("a red one"), user("When?")],
            Some("in May"),
        );
        let second = told(r#"[{"you":"Sell me a bike"},{"agent":"Which?"},{"you":"a red one"},{"agent":"When?"}]"#);
        check("be good", std::slice::from_ref(&second), Some("in May"));
        check("be good", &[second, model("in May"), user("Ordered.")], Some(DONE));
    }
}

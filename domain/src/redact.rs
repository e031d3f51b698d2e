//! Taking secrets out of text.
//!
//! First exact values that we know to be secret, then whatever looks like a key. One pass each over the bytes, without backtracking: the time is
//! linear in the text, whatever the text is. Redacting twice changes nothing.

use std::{borrow::Cow, collections::BTreeSet, fmt, ops::Range};

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use serde_json::{Map, Value};

mod assignment;
mod secret;
mod shapes;

pub use assignment::assigns_password;
pub use secret::{is_secret_variable, is_token_shaped};

/// What stands in the place of a secret.
pub const REDACTED: &str = "[redacted]";

/// The shortest value that is redacted as such: shorter ones would tear ordinary words apart.
pub const MIN_SECRET: usize = 8;

/// Only a URL's password can hold what another shape has left, and what is left of a password is [`REDACTED`] alone: two passes find all.
const SHAPE_PASSES: usize = 2;

/// Bytes of all forms of all secrets up to which the automaton may be the fastest one, of some megabytes.
const MAX_FAST_BYTES: usize = 16 << 10;

/// Removes the secrets of one trial.
#[derive(Clone, Default)]
pub struct Redactor {
    exact: Option<AhoCorasick>,
}

/// Tells nothing: the automaton would spell out the secrets.
impl fmt::Debug for Redactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redactor").finish_non_exhaustive()
    }
}

impl Redactor {
    /// A redactor of shapes and of these secret values. Of a value that is a URL only its password and token-like parts are secret; of one that
    /// is a JSON object or array, each string in it. Values shorter than [`MIN_SECRET`] characters are ignored.
    pub fn new<S: AsRef<str>>(values: impl IntoIterator<Item = S>) -> Self {
        let mut secrets = BTreeSet::new();
        for value in values {
            secret::collect(value.as_ref(), &mut secrets);
        }
        let mut forms = BTreeSet::new();
        for secret in secrets {
            add_forms(secret, &mut forms);
        }
        // A value that occurs in the replacement would be found again and again.
        forms.retain(|form| !form.contains(REDACTED) && !REDACTED.contains(form.as_str()));
        // Construction fails only beyond 2^31 states: some hundred megabytes of secrets, far above any limit on what holds them.
        let bytes: usize = forms.iter().map(String::len).sum();
        // Left alone it makes the fastest automaton of a few patterns, which takes about a kilobyte for each of their bytes.
        let kind = (bytes > MAX_FAST_BYTES).then_some(AhoCorasickKind::ContiguousNFA);
        let build = || {
            AhoCorasick::builder()
                .kind(kind)
                .build(&forms)
                .expect("the secrets of one trial are small")
        };
        let exact = (!forms.is_empty()).then(build);
        Self { exact }
    }

    /// The text without its secrets.
    pub fn text<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let text = match &self.exact {
            Some(exact) => replace(text, merge(exact, text)),
            None => Cow::Borrowed(text),
        };
        // What one pass has replaced can complete a shape around it: a key block in the password of a URL, whose spaces had hidden the URL.
        (0..SHAPE_PASSES).fold(text, |text, _| match text {
            Cow::Borrowed(text) => replace(text, shapes::find(text)),
            Cow::Owned(text) => match replace(&text, shapes::find(&text)) {
                Cow::Borrowed(_) => Cow::Owned(text),
                Cow::Owned(cleaner) => Cow::Owned(cleaner),
            },
        })
    }

    /// Removes the secrets of a string in place.
    pub fn string(&self, text: &mut String) {
        if let Cow::Owned(clean) = self.text(text) {
            *text = clean;
        }
    }

    /// Removes the secrets of every string and key of a JSON value.
    pub fn json(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.string(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.json(value)),
            Value::Object(map) => {
                let entries = std::mem::take(map).into_iter().map(|(mut key, mut value)| {
                    self.string(&mut key);
                    self.json(&mut value);
                    (key, value)
                });
                *map = entries.collect::<Map<_, _>>();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// A secret as it is, and as it looks inside JSON, inside JSON inside JSON, and in JSON of ASCII only.
fn add_forms(secret: String, forms: &mut BTreeSet<String>) {
    let escape = |text: &str| {
        let quoted = Value::from(text).to_string();
        quoted[1..quoted.len() - 1].to_owned()
    };
    let once = escape(&secret);
    forms.insert(escape(&once));
    forms.insert(once.replace('/', "\\/"));
    let mut ascii = String::new();
    for c in once.chars() {
        match c.is_ascii() {
            true => ascii.push(c),
            false => c
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| ascii.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    forms.extend([ascii, once, secret]);
}

/// Every place that an exact value covers. Overlapping ones become one, so that no rest of the longer, or of the later, is left.
fn merge(exact: &AhoCorasick, text: &str) -> Vec<Range<usize>> {
    let mut places: Vec<Range<usize>> = Vec::new();
    for found in exact.find_overlapping_iter(text) {
        // Matches come in the order of their ends, so only the last places can be touched.
        let mut place = found.range();
        while let Some(last) = places.last().filter(|last| last.end > place.start) {
            place.start = place.start.min(last.start);
            places.pop();
        }
        places.push(place);
    }
    places
}

/// Replaces sorted, disjoint places.
fn replace(text: &str, places: Vec<Range<usize>>) -> Cow<'_, str> {
    if places.is_empty() {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len());
    let mut done = 0;
    for place in places {
        clean.push_str(&text[done..place.start]);
        clean.push_str(REDACTED);
        done = place.end;
    }
    clean.push_str(&text[done..]);
    Cow::Owned(clean)
}

//! What the drivers of built-in agents have in common: keys, programs, environments, instruction files.

use std::collections::BTreeMap;

use evalgrid_domain::limits::MAX_PROCESS_STRING_BYTES;

use crate::{HarnessError, Install, Place, Purpose, Setting, TextFile, Turn, TurnCommand, command::SYSTEM_PROMPT};

/// One kind of built-in agent, as texts name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agent {
    /// As in a variant.
    pub(crate) name: &'static str,
    /// The variable that holds its key on the server.
    pub(crate) key: &'static str,
}

impl Agent {
    /// The key that came with the trial.
    pub(crate) fn api_key<'a>(&self, setting: &'a Setting) -> Result<&'a str, HarnessError> {
        let key = setting.credential.get("apiKey").map(String::as_str);
        key.filter(|key| !key.is_empty()).ok_or(HarnessError::NoKey(self.name))
    }
}

/// The model server that the operator names, without a slash at its end; `None` means the vendor's own.
pub(crate) fn base_url(setting: &Setting) -> Option<&str> {
    let url = setting.credential.get("baseUrl")?.trim_end_matches('/');
    (!url.is_empty()).then_some(url)
}

/// A command line that is being put together.
pub(crate) struct CommandLine {
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    files: Vec<TextFile>,
}

/// Starts what follows the path of a file, with the file as its stdin.
const FROM_FILE: &str = "exec < \"$1\" || exit\nshift\nexec \"$@\"";

impl CommandLine {
    /// The install's program, or the configured one, in the trial's own environment.
    pub(crate) fn new(install: &Install, setting: &Setting) -> Result<Self, HarnessError> {
        Ok(Self {
            argv: vec![install.program(setting)?],
            env: setting.env.clone(),
            files: Vec::new(),
        })
    }

    /// A line of bash; what is added next are its `$0`, `$1` and so on.
    pub(crate) fn shell(setting: &Setting, script: &str) -> Self {
        Self {
            argv: vec![crate::SHELL.into(), "-c".into(), script.into()],
            env: setting.env.clone(),
            files: Vec::new(),
        }
    }

    /// Adds arguments.
    pub(crate) fn args<'a>(&mut self, args: impl IntoIterator<Item = &'a str>) -> &mut Self {
        self.argv.extend(args.into_iter().map(str::to_owned));
        self
    }

    /// Adds `name value` where there is a value.
    pub(crate) fn option(&mut self, name: &str, value: Option<&str>) -> &mut Self {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            self.args([name, value]);
        }
        self
    }

    /// Sets variables, over the trial's own.
    pub(crate) fn env<'a>(&mut self, variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> &mut Self {
        self.env
            .extend(variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        self
    }

    /// Puts the prompt into a file of HOME; gives the file's path.
    pub(crate) fn prompt_file(&mut self, setting: &Setting, turn: &Turn<'_>) -> String {
        let path = format!(".evalgrid/prompt-{}", turn.number);
        let whole = format!("{}/{path}", setting.home);
        self.files.push(TextFile {
            private: true,
            ..TextFile::new(Place::Home, path, not_a_command(turn.prompt).as_ref())
        });
        whole
    }

    /// Makes a file with the prompt the stdin of all that was put together so far.
    pub(crate) fn prompt_from_stdin(&mut self, name: &str, setting: &Setting, turn: &Turn<'_>) -> &mut Self {
        let path = self.prompt_file(setting, turn);
        let shell = [crate::SHELL, "-c", FROM_FILE, name, &path].map(str::to_owned);
        self.argv.splice(0..0, shell);
        self
    }

    /// The command line, unless Linux would refuse to start it.
    pub(crate) fn finish(&mut self) -> Result<TurnCommand, HarnessError> {
        let long = |text: &&String| text.len() > MAX_PROCESS_STRING_BYTES;
        if let Some(text) = self.argv.iter().find(long) {
            return Err(HarnessError::TooLong {
                what: "an argument (the prompt or the system prompt)",
                bytes: text.len(),
            });
        }
        if let Some(text) = self.env.values().find(long) {
            return Err(HarnessError::TooLong {
                what: "a variable",
                bytes: text.len(),
            });
        }
        Ok(TurnCommand {
            files: std::mem::take(&mut self.files),
            argv: std::mem::take(&mut self.argv),
            env: std::mem::take(&mut self.env),
        })
    }
}

/// A prompt that programs without `--` must not take for an option or the name of a file: a leading blank changes nothing for a model.
pub(crate) fn not_an_option<'a>(turn: &Turn<'a>) -> std::borrow::Cow<'a, str> {
    match turn.prompt.starts_with(['-', '@']) {
        true => format!(" {}", turn.prompt).into(),
        false => turn.prompt.into(),
    }
}

/// Words that are no slash command, though an agent under test may have written them so: a model sees a quotation.
fn not_a_command(prompt: &str) -> std::borrow::Cow<'_, str> {
    match prompt.trim_start().starts_with('/') {
        true => format!("> {prompt}").into(),
        false => prompt.into(),
    }
}

/// It answers in words only.
pub(crate) fn in_words(setting: &Setting) -> bool {
    setting.purpose == Purpose::Words
}

/// The system prompt's own file in HOME, where there is one.
pub(crate) fn system_prompt_path(setting: &Setting) -> Option<String> {
    let _ = setting.system_prompt.as_ref()?;
    Some(format!("{}/{SYSTEM_PROMPT}", setting.home))
}

/// The system prompt as a file of its own.
pub(crate) fn system_prompt(setting: &Setting) -> Vec<TextFile> {
    let system_prompt = setting.system_prompt.iter();
    system_prompt
        .map(|text| TextFile::new(Place::Home, SYSTEM_PROMPT, text.as_str()))
        .collect()
}

/// The system prompt as a file of its own, and before the instructions that the agent reads from the workspace.
pub(crate) fn instructions(setting: &Setting, file: &str) -> Vec<TextFile> {
    let mut files = system_prompt(setting);
    if let Some(text) = &setting.system_prompt {
        files.push(TextFile {
            prepend: true,
            ..TextFile::new(Place::Workspace, file, format!("{}\n\n", text.trim_end()))
        });
    }
    files
}

/// A JSON file of HOME.
pub(crate) fn json_file(path: &str, content: &serde_json::Value) -> TextFile {
    TextFile::new(Place::Home, path, format!("{content:#}\n"))
}

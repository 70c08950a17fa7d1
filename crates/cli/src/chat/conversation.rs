//! What was said so far, and its file.

use std::io::Write;
use std::path::Path;

use serde_json::{Value as Json, json};

use crate::failure::Failure;
use crate::prompt;

/// Messages, as chat templates take them.
#[derive(Debug)]
pub struct Conversation {
    messages: Vec<Json>,
    system: Option<String>,
    /// Files to send with the next message.
    attached: String,
}

impl Conversation {
    /// Nothing said yet.
    pub fn new(system: Option<String>) -> Conversation {
        let mut new = Conversation { messages: Vec::new(), system, attached: String::new() };
        new.reset();
        new
    }

    /// Starts over.
    pub fn reset(&mut self) {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        self.messages = system.collect();
        self.attached.clear();
    }

    /// The messages.
    pub fn messages(&self) -> &[Json] {
        &self.messages
    }

    /// Sends a file with the next message; its length in bytes.
    ///
    /// # Errors
    /// If it cannot be read, or is no text.
    pub fn attach(&mut self, path: &Path) -> Result<usize, Failure> {
        let text = prompt::read(path)?;
        // A fence that the text itself does not have.
        let mut fence = "```".to_string();
        while text.contains(&fence) {
            fence.push('`');
        }
        self.attached += &format!("{}:\n{fence}\n{}\n{fence}\n\n", path.display(), text.trim_end());
        Ok(text.len())
    }

    /// Adds the user's message.
    pub fn say(&mut self, message: &str) {
        let content = format!("{}{message}", self.attached);
        self.messages.push(json!({"role": "user", "content": content}));
    }

    /// Takes the last message back; files go with the next one again.
    pub fn take_back(&mut self) {
        self.messages.pop();
    }

    /// Adds the model's answer.
    pub fn hear(&mut self, content: &str, reasoning: &str) {
        self.attached.clear();
        let mut message = json!({"role": "assistant", "content": content});
        if !reasoning.is_empty() {
            message["reasoning_content"] = Json::from(reasoning);
        }
        self.messages.push(message);
    }

    /// Writes the messages. A file that is something else is left alone.
    ///
    /// # Errors
    /// If there is such a file, or it cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), Failure> {
        let fail = |source| Failure::File { path: path.to_path_buf(), source };
        if path.metadata().is_ok_and(|file| file.len() > 0) && read(path).is_err() {
            return Err(Failure::Usage(format!(
                "{}: is there already and no conversation; choose another name",
                path.display()
            )));
        }
        let text = serde_json::to_string_pretty(&self.messages).expect("messages are JSON") + "\n";
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".tmp");
        let written = std::fs::File::create(&temporary)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| std::fs::rename(&temporary, path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            fail(error)
        })
    }

    /// Goes on with the messages of a file; how many.
    ///
    /// # Errors
    /// If it is no conversation. Nothing has changed then.
    pub fn load(&mut self, path: &Path) -> Result<usize, Failure> {
        self.messages = read(path)?;
        self.attached.clear();
        Ok(self.messages.len())
    }
}

fn read(path: &Path) -> Result<Vec<Json>, Failure> {
    let wrong = |what: &str| Failure::Usage(format!("{}: is no conversation: {what}", path.display()));
    let json: Json = serde_json::from_str(&prompt::read(path)?).map_err(|error| wrong(&error.to_string()))?;
    let Json::Array(messages) = json else { return Err(wrong("expected a list of messages")) };
    let roles = ["system", "user", "assistant", "tool"];
    let whole = |message: &Json| {
        message["role"].as_str().is_some_and(|role| roles.contains(&role)) && message["content"].is_string()
    };
    match messages.iter().position(|message| !whole(message)) {
        Some(bad) => Err(wrong(&format!("message {bad} lacks a role or content"))),
        None => Ok(messages),
    }
}

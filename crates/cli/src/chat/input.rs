//! Where messages come from: a terminal with a line editor, or a pipe.

use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::failure::Failure;
use crate::report;

/// Most bytes of a line that are read from a pipe.
const LONGEST: u64 = 256 << 20;
/// Lines that the history keeps.
const HISTORY: usize = 1000;
/// Opens and closes a message of several lines.
const BLOCK: &str = "\"\"\"";

/// What was said.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its text.
    pub text: String,
    /// Written between `"""`: never a command.
    pub block: bool,
}

/// Lines of a message that is not complete.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    block: bool,
}

impl Lines {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && !self.block
    }

    /// Takes a line; the message if it is complete.
    fn push(&mut self, line: &str) -> Option<Entry> {
        let mut line = line;
        if self.is_empty()
            && let Some(rest) = line.trim_start().strip_prefix(BLOCK)
        {
            self.block = true;
            if rest.trim().is_empty() {
                return None;
            }
            line = rest;
        }
        if self.block {
            let Some(last) = line.trim_end().strip_suffix(BLOCK) else {
                self.text += line;
                self.text.push('\n');
                return None;
            };
            self.text += last;
            return Some(self.take());
        }
        if let Some(more) = line.strip_suffix('\\') {
            self.text += more;
            self.text.push('\n');
            return None;
        }
        self.text += line;
        Some(self.take())
    }

    fn take(&mut self) -> Entry {
        let Lines { text, block } = std::mem::take(self);
        Entry { text, block }
    }
}

enum Source {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Pipe,
}

/// A line, or why there is none.
enum Line {
    Text(String),
    Interrupted,
    End,
}

/// Messages, one after the other.
pub struct Input(Source);

impl Input {
    /// Standard input; a terminal remembers what was typed in a file unless that is not wanted.
    ///
    /// # Errors
    /// If the terminal refuses.
    pub fn new(history: bool) -> Result<Input, Failure> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input(Source::Pipe));
        }
        let config = rustyline::Config::builder().max_history_size(HISTORY).map_err(terminal)?.build();
        let mut editor = DefaultEditor::with_config(config).map_err(terminal)?;
        let history = history.then(history_file).flatten();
        if let Some(path) = &history {
            // There is none the first time; one that cannot be read is no reason not to talk.
            let _ = editor.load_history(path);
        }
        Ok(Input(Source::Terminal { editor: Box::new(editor), history }))
    }

    /// Whether somebody types.
    pub fn is_terminal(&self) -> bool {
        matches!(self.0, Source::Terminal { .. })
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// If the input cannot be read.
    pub fn next(&mut self) -> Result<Option<Entry>, Failure> {
        let mut lines = Lines::default();
        loop {
            match self.line(if lines.is_empty() { "> " } else { "… " })? {
                Line::Text(line) => {
                    if let Some(entry) = lines.push(&line) {
                        self.remember(&entry);
                        return Ok(Some(entry));
                    }
                }
                // What has been typed is given up.
                Line::Interrupted => lines = Lines::default(),
                Line::End if lines.is_empty() => return Ok(None),
                Line::End => return Ok(Some(lines.take())),
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Line, Failure> {
        match &mut self.0 {
            Source::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(terminal(error)),
            },
            Source::Pipe => pipe_line(&mut std::io::stdin().lock()),
        }
    }

    /// Adds a message to the history, and to its file at once: another conversation may be open.
    fn remember(&mut self, entry: &Entry) {
        let Source::Terminal { editor, history } = &mut self.0 else { return };
        let text = if entry.block { format!("{BLOCK}{}{BLOCK}", entry.text) } else { entry.text.clone() };
        // A history that cannot be written is no reason not to talk.
        let _ = editor.add_history_entry(text);
        if let Some(path) = history {
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = editor.append_history(path);
        }
    }
}

fn pipe_line(input: &mut impl BufRead) -> Result<Line, Failure> {
    let mut bytes = Vec::new();
    let read = input.take(LONGEST + 1).read_until(b'\n', &mut bytes);
    if read.map_err(|error| Failure::Usage(format!("cannot read the input: {error}")))? == 0 {
        return Ok(Line::End);
    }
    if bytes.len() as u64 > LONGEST {
        let limit = report::size(LONGEST);
        return Err(Failure::Usage(format!("a line of more than {limit} is no message for any model")));
    }
    let line = String::from_utf8(bytes)
        .map_err(|_| Failure::Usage("the input is not UTF-8; convert it first (iconv)".to_string()))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Line::Text(line.strip_suffix('\r').unwrap_or(line).to_string()))
}

fn terminal(error: ReadlineError) -> Failure {
    Failure::Usage(format!("cannot read from the terminal: {error}"))
}

/// Where the history lies: the user's folder for state.
fn history_file() -> Option<PathBuf> {
    let state = crate::folders::state()?;
    Some(state.join("chat-history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(lines: &[&str]) -> Vec<(String, bool)> {
        let mut open = Lines::default();
        let entries = lines.iter().filter_map(|line| open.push(line));
        entries.map(|entry| (entry.text, entry.block)).collect()
    }

    #[test]
    fn lines_become_messages() {
        let said = |text: &str| (text.to_string(), false);
        let block = |text: &str| (text.to_string(), true);
        assert_eq!(messages(&["one", "two"]), [said("one"), said("two")]);
        assert_eq!(messages(&["a \\", "b\\", "c", "d"]), [said("a \nb\nc"), said("d")]);
        assert_eq!(messages(&["\"\"\"", "/file", "  x", "\"\"\"", "y"]), [block("/file\n  x\n"), said("y")]);
        assert_eq!(messages(&["\"\"\"a", "b\"\"\""]), [block("a\nb")]);
        assert_eq!(messages(&["\"\"\"a\"\"\"", "say \"\"\" x"]), [block("a"), said("say \"\"\" x")]);
        assert_eq!(messages(&["\"\"\"", "a\\", ""]), []);
    }

    #[test]
    fn pipes_are_read_line_by_line() {
        let mut input: &[u8] = b"one\r\n\ntwo";
        let mut next = || match pipe_line(&mut input).unwrap() {
            Line::Text(text) => Some(text),
            _ => None,
        };
        assert_eq!(
            [next(), next(), next(), next()].map(|l| l.unwrap_or("END".into())),
            ["one", "", "two", "END"]
        );
        assert!(pipe_line(&mut &b"\xff\n"[..]).is_err());
    }
}

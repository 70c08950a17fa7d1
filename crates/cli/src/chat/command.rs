//! What a line means: a command, or a message.

use std::path::Path;

/// What the commands do, for people.
pub const HELP: &str = "\
/file PATH   send a file with the next message
/reset       start over
/save FILE   write the conversation as JSON
/load FILE   go on with a conversation written before
/stats       what was reused, read and written, and how fast
/help        this
/quit        leave; so does Ctrl-D
A line that ends with \\ goes on in the next one; a message between \"\"\" and \"\"\" may have many. A message that begins
like a command: //text. Ctrl-C stops the answer or the reading, and the conversation goes on.";

const NAMES: [&str; 7] = ["file", "reset", "save", "load", "stats", "help", "quit"];
/// Edits after which a name is still taken for a slip.
const NEAR: usize = 2;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Send a file with the next message.
    File(&'a Path),
    /// Start over.
    Reset,
    /// Write the conversation.
    Save(&'a Path),
    /// Read one.
    Load(&'a Path),
    /// Tell numbers.
    Stats,
    /// Tell the commands.
    Help,
    /// Leave.
    Quit,
    /// Ask this.
    Say(&'a str),
    /// Nothing.
    Nothing,
}

/// The meaning of a line.
///
/// # Errors
/// For people: no such command, or its file is missing.
pub fn parse(line: &str) -> Result<Command<'_>, String> {
    let trimmed = line.trim();
    if trimmed.is_empty() {
        return Ok(Command::Nothing);
    }
    let Some(rest) = trimmed.strip_prefix('/') else { return Ok(Command::Say(line)) };
    if rest.starts_with('/') {
        return Ok(Command::Say(rest));
    }
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    // `/usr/bin is full` is a message.
    if !name.chars().all(|c| c.is_ascii_alphabetic()) || name.is_empty() {
        return Ok(Command::Say(line));
    }
    let argument = argument.trim();
    let file = || match argument {
        "" => Err(format!("/{name} needs a file: /{name} PATH")),
        path => Ok(Path::new(path)),
    };
    Ok(match name {
        "file" => Command::File(file()?),
        "reset" => Command::Reset,
        "save" => Command::Save(file()?),
        "load" => Command::Load(file()?),
        "stats" => Command::Stats,
        "help" => Command::Help,
        "quit" | "exit" => Command::Quit,
        _ => return Err(unknown(name)),
    })
}

fn unknown(name: &str) -> String {
    let distance = |known: &&str| if known.starts_with(name) { 0 } else { edits(name, known) };
    match NAMES.iter().min_by_key(|known| distance(known)).filter(|known| distance(known) <= NEAR) {
        Some(near) => format!("/{name} is no command; did you mean /{near}?"),
        None => format!("/{name} is no command; /help lists them, //{name} says it to the model"),
    }
}

/// The least number of characters to insert, delete or replace between two words.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_messages() {
        assert_eq!(parse("  "), Ok(Command::Nothing));
        assert_eq!(parse("/save  a file.json "), Ok(Command::Save(Path::new("a file.json"))));
        assert_eq!(parse("/quit"), Ok(Command::Quit));
        assert_eq!(parse("/usr/bin is full"), Ok(Command::Say("/usr/bin is full")));
        assert_eq!(parse("//help me"), Ok(Command::Say("/help me")));
        assert_eq!(parse("/"), Ok(Command::Say("/")));
        assert_eq!(parse("  indented\n"), Ok(Command::Say("  indented\n")));
        assert!(parse("/load").unwrap_err().contains("needs a file"));
    }

    #[test]
    fn slips_are_told_what_was_meant() {
        for (slip, meant) in
            [("/stat", "/stats"), ("/rest", "/reset"), ("/sav x", "/save"), ("/hlep", "/help")]
        {
            let said = parse(slip).unwrap_err();
            assert!(said.contains(&format!("did you mean {meant}?")), "{said}");
        }
        assert!(parse("/nonsense").unwrap_err().contains("/help lists them"));
    }

    #[test]
    fn edits_are_counted() {
        for (a, b, n) in
            [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("save", "load", 4), ("ab", "ba", 2)]
        {
            assert_eq!(edits(a, b), n, "{a} {b}");
            assert_eq!(edits(b, a), n, "{b} {a}");
        }
    }
}

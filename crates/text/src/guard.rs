//! Keeps what a user wrote apart from what a template wrote, through the rendering of a template.
//!
//! A template joins its own text, in which `<|im_end|>` ends a turn, with values from users and tools, in which the
//! same characters are just characters. After rendering nobody could tell them apart, so values are marked before:
//! with noncharacters (U+FDD0…), which a template passes through and which take no part in the text.
//!
//! - **Control tokens** must be safe against everything a template does (joining parts, removing parts, putting `<`
//!   before a key). So [`BREAK`] goes after each character that could belong to the frame of one: `<` and `|` for this
//!   family. No control token in the output is then spelled with such a character of a value. A `<` before a letter or a
//!   slash needs no mark, as no control token goes on so; this leaves `'</think>' in content` and its like working.
//! - **User-defined tokens** (`<think>`, `<tool_call>`) are looked for by templates in what the assistant said before, and
//!   stay untouched there: history keeps its ids. In other values a mark stands next to each: [`NOT_LEFT`] after an
//!   opening tag or [`NOT_RIGHT`] before a closing one, so that `startswith` and `endswith` still see the tag.
//! - Marks a user wrote are [`ESCAPE`]d.
//!
//! Two limits: inside a template, a value with marks is longer than the user's text, by which `length` and slices go;
//! and a token that the template spells in part itself, leaving only letters to a value (`'<' ~ key ~ '>'` with the key
//! `think`), is a token.

use crate::TokenKind;
use crate::specials::{Special, Specials};

/// Breaks any token it stands in.
pub(crate) const BREAK: char = '\u{FDD0}';
/// The token that ends before this is plain text.
pub(crate) const NOT_LEFT: char = '\u{FDD1}';
/// The token that starts after this is plain text.
pub(crate) const NOT_RIGHT: char = '\u{FDD2}';
/// The next character stands for a mark the user wrote.
pub(crate) const ESCAPE: char = '\u{FDD3}';
/// First of the characters that follow an [`ESCAPE`], one for each mark.
const ESCAPED: char = '\u{FDD4}';
const MARKS: [char; 4] = [BREAK, NOT_LEFT, NOT_RIGHT, ESCAPE];

/// Who wrote a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// User, tool, system, schema: no token of any kind.
    Outside,
    /// The assistant's own earlier words: user-defined tokens keep their ids, control tokens do not.
    Assistant,
}

/// Marks values; see the module's text.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    specials: Specials,
    user_defined: Specials,
    /// Characters that the frames of control tokens are made of: ASCII ones, and others that start one.
    frame: [bool; 128],
    frame_beyond_ascii: Vec<char>,
    /// Control tokens of one character.
    single: Vec<char>,
    /// Second characters of control tokens: a frame character before another ASCII letter or slash needs no mark.
    seconds: Vec<char>,
}

impl Guard {
    pub(crate) fn new(specials: &Specials) -> Guard {
        let of_kind = |kind| move |special: &&Special| special.kind == kind;
        let user_defined = specials.iter().filter(of_kind(TokenKind::UserDefined)).cloned().collect();
        let mut guard = Guard {
            specials: specials.clone(),
            user_defined: Specials::new(user_defined),
            frame: [false; 128],
            frame_beyond_ascii: Vec::new(),
            single: Vec::new(),
            seconds: Vec::new(),
        };
        for special in specials.iter().filter(of_kind(TokenKind::Control)) {
            guard.watch(&special.text);
        }
        guard
    }

    /// Learns the frame of a control token.
    fn watch(&mut self, token: &str) {
        for (at, c) in token.char_indices() {
            // The last character has nothing after it to be kept apart from.
            let last = at > 0 && at + c.len_utf8() == token.len();
            let framing = at == 0 || (c.is_ascii_punctuation() && !matches!(c, '_' | '-'));
            match (framing && !last, c.is_ascii()) {
                (true, true) => self.frame[c as usize] = true,
                (true, false) => self.frame_beyond_ascii.push(c),
                (false, _) => {}
            }
        }
        match token.chars().nth(1) {
            Some(second) => self.seconds.push(second),
            None => self.single.extend(token.chars().next()),
        }
    }

    /// The value with its marks.
    pub(crate) fn mark(&self, value: &str, origin: Origin) -> String {
        let mut out = String::with_capacity(value.len() + 16);
        // The marks, and nothing common, start with 0xEF.
        let beyond_ascii = if self.frame_beyond_ascii.is_empty() { 0xEF..=0xEF } else { 0x80..=0xFF };
        let watched = |byte: u8| match self.frame.get(usize::from(byte)) {
            Some(&framing) => framing,
            None => beyond_ascii.contains(&byte),
        };
        let outside = origin == Origin::Outside;
        if value.bytes().any(watched) || (outside && self.user_defined.find(value, 0).is_some()) {
            self.mark_slowly(value, outside, &mut out);
        } else {
            out.push_str(value);
        }
        if outside {
            self.mark_end(&mut out);
        }
        out
    }

    fn mark_slowly(&self, value: &str, outside: bool, out: &mut String) {
        // Where a NOT_LEFT is due: the end of a user-defined token that has begun.
        let mut token_end = None;
        let mut chars = value.char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            if token_end == Some(at) {
                out.push(NOT_LEFT);
                token_end = None;
            }
            let token =
                (outside && token_end.is_none()).then(|| self.user_defined.longest_at(value, at)).flatten();
            match token {
                Some(token) if token.text.starts_with("</") => out.push(NOT_RIGHT),
                Some(token) => token_end = Some(at + token.text.len()),
                None => {}
            }
            if let Some(index) = MARKS.iter().position(|&mark| mark == c) {
                out.push(ESCAPE);
                out.extend(char::from_u32(ESCAPED as u32 + index as u32));
                continue;
            }
            out.push(c);
            if self.needs_break(c, chars.peek().map(|&(_, next)| next)) {
                out.push(if self.single.contains(&c) { NOT_LEFT } else { BREAK });
            }
        }
        if token_end == Some(value.len()) {
            out.push(NOT_LEFT);
        }
    }

    fn needs_break(&self, c: char, next: Option<char>) -> bool {
        let framing = match self.frame.get(c as usize) {
            Some(&framing) => framing,
            None => self.frame_beyond_ascii.contains(&c),
        };
        let harmless = next.is_some_and(|next| {
            c == '<' && (next.is_ascii_alphabetic() || next == '/') && !self.seconds.contains(&next)
        });
        framing && !harmless
    }

    /// A value that ends inside a token must not complete it with the value after it, even if the template trims
    /// the white space in between.
    fn mark_end(&self, out: &mut String) {
        let trimmed = out.trim_end();
        if self.user_defined.unfinished_end(trimmed) > 0 {
            out.insert(trimmed.len(), BREAK);
        }
    }

    /// Splits a rendered text into plain text, marks taken out, and the tokens its template wrote.
    pub(crate) fn resolve(&self, marked: &str) -> Vec<Segment> {
        let mut out = Segments::default();
        let mut start = 0;
        let mut from = 0;
        while let Some((at, special)) = self.specials.find(marked, from) {
            let end = at + special.text.len();
            from = end;
            if marked[..at].ends_with(NOT_RIGHT) || marked[end..].starts_with(NOT_LEFT) {
                continue;
            }
            out.text(&marked[start..at]);
            out.0.push(Segment::Token { id: special.id, text: special.text.clone() });
            start = end;
        }
        out.text(&marked[start..]);
        out.0
    }
}

/// A stretch of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// Ordinary text: no control token comes of it, whatever it spells.
    Text(String),
    /// A control or user-defined token of the template.
    Token {
        /// Its id.
        id: u32,
        /// How it is written.
        text: String,
    },
}

#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    /// Adds marked text, without its marks.
    fn text(&mut self, marked: &str) {
        if marked.is_empty() {
            return;
        }
        let text = unmark(marked);
        if !text.is_empty() {
            self.0.push(Segment::Text(text));
        }
    }
}

/// The user's own character that follows an [`ESCAPE`] as `c`.
pub(crate) fn unescape(c: char) -> char {
    let mark = MARKS.get((c as u32).wrapping_sub(ESCAPED as u32) as usize);
    mark.copied().unwrap_or(c)
}

/// Takes the marks out and puts the user's own ones back.
pub(crate) fn unmark(marked: &str) -> String {
    let mut out = String::with_capacity(marked.len());
    let mut chars = marked.chars();
    while let Some(c) = chars.next() {
        match c {
            BREAK | NOT_LEFT | NOT_RIGHT => {}
            ESCAPE => out.extend(chars.next().map(unescape)),
            c => out.push(c),
        }
    }
    out
}

/// Whether a template's source uses a character that is reserved for marks.
pub(crate) fn has_mark(text: &str) -> bool {
    text.contains(MARKS)
}

/// Whether a character of a marked string is a mark, not text.
pub(crate) fn is_mark(c: char) -> bool {
    matches!(c, BREAK | NOT_LEFT | NOT_RIGHT)
}

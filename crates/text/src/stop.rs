//! Stop strings in a stream of text.

/// Watches a stream of text for stop strings and holds back what may be the start of one. Of several, the one that is
/// complete first ends the stream (of two that end together, the longer). The result does not depend on how the
/// stream is cut.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text that is a beginning of a stop string and has not been given out.
    held: String,
    matched: Option<usize>,
}

/// One stop string and how far it is matched (Knuth, Morris, Pratt).
#[derive(Debug, Clone)]
struct Stop {
    /// Position in the list the matcher was made from.
    index: usize,
    bytes: Vec<u8>,
    /// `fallback[n]`: the longest beginning of the string that is also a proper end of its first `n + 1` bytes.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(index: usize, text: &str) -> Stop {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = fallback[matched - 1];
            }
            matched += usize::from(bytes[at] == bytes[matched]);
            fallback[at] = matched;
        }
        Stop { index, bytes, fallback, matched: 0 }
    }

    /// Goes on by one byte; true when the string is complete.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

impl StopMatcher {
    /// A matcher for these strings; empty ones are ignored.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> StopMatcher {
        let stops = stops.iter().map(AsRef::as_ref).enumerate().filter(|(_, text)| !text.is_empty());
        StopMatcher {
            stops: stops.map(|(index, text)| Stop::new(index, text)).collect(),
            held: String::new(),
            matched: None,
        }
    }

    /// The text that can be given out now that `text` has come. After a match, everything before the stop string
    /// has been given out and nothing more comes.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if stop.advance(byte) && found.is_none_or(|(len, _)| stop.bytes.len() > len) {
                    found = Some((stop.bytes.len(), stop.index));
                }
            }
            if let Some((len, index)) = found {
                self.matched = Some(index);
                self.held.truncate(before + at + 1 - len);
                return std::mem::take(&mut self.held);
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, kept)
    }

    /// Index of the stop string that ended the stream.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// What is still held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}

//! Token ids from a file, and ranges of positions.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use crate::error::Error;

/// Reads token ids: a JSON array of integers, or integers separated by
/// whitespace. Every id must lie in `0..vocabulary`; at least one is required.
pub fn read(path: &Path, vocabulary: usize) -> Result<Vec<i32>, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
    parse(&text, vocabulary).map_err(|what| Error::Content { path: path.to_path_buf(), what })
}

fn parse(text: &str, vocabulary: usize) -> Result<Vec<i32>, String> {
    let ids: Vec<u64> = if text.trim_start().starts_with('[') {
        serde_json::from_str(text).map_err(|error| format!("not a JSON array of token ids: {error}"))?
    } else {
        text.split_whitespace()
            .map(|word| word.parse().map_err(|_| format!("{word:?} is not a token id")))
            .collect::<Result<_, _>>()?
    };
    if ids.is_empty() {
        return Err("no token ids in it".to_string());
    }
    ids.iter()
        .enumerate()
        .map(|(index, &id)| match i32::try_from(id) {
            Ok(token) if id < vocabulary as u64 => Ok(token),
            _ => {
                Err(format!("token {id} at index {index} is outside the model's vocabulary of {vocabulary}"))
            }
        })
        .collect()
}

/// Positions `a..b`, `a..` or `..b`, end exclusive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    start: Option<usize>,
    end: Option<usize>,
}

impl Rows {
    /// Every position.
    pub const ALL: Rows = Rows { start: None, end: None };

    /// The positions meant among `tokens` of them; an empty or overlong range is an error.
    pub fn within(&self, tokens: usize) -> Result<Range<usize>, Error> {
        let range = self.start.unwrap_or(0)..self.end.unwrap_or(tokens);
        if range.is_empty() || range.end > tokens {
            return Err(Error::Rows { rows: self.to_string(), tokens });
        }
        Ok(range)
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |bound: Option<usize>| bound.map(|value| value.to_string()).unwrap_or_default();
        write!(f, "{}..{}", side(self.start), side(self.end))
    }
}

impl FromStr for Rows {
    type Err = String;

    fn from_str(text: &str) -> Result<Rows, String> {
        let wanted = || format!("{text:?} is not a range like 10..20, 10.. or ..20");
        let (start, end) = text.split_once("..").ok_or_else(wanted)?;
        let side = |part: &str| match part {
            "" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| wanted()),
        };
        Ok(Rows { start: side(start)?, end: side(end)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_notations_give_the_same_ids() {
        assert_eq!(parse("[3, 1,\n2]\n", 4).unwrap(), [3, 1, 2]);
        assert_eq!(parse(" 3 1\n2\t", 4).unwrap(), [3, 1, 2]);
    }

    #[test]
    fn unusable_ids_are_named() {
        assert!(parse("0 4", 4).unwrap_err().contains("token 4 at index 1"));
        assert!(parse("0 4294967296", 4).unwrap_err().contains("4294967296"));
        assert!(parse("0 -1", 4).unwrap_err().contains("\"-1\""));
        assert!(parse("[0, \"a\"]", 4).unwrap_err().contains("JSON"));
        assert!(parse(" \n", 4).unwrap_err().contains("no token ids"));
        assert!(parse("[]", 4).unwrap_err().contains("no token ids"));
    }

    #[test]
    fn rows_are_half_open_and_bounded() {
        let rows = |text: &str| text.parse::<Rows>().unwrap().within(10);
        assert_eq!(rows("2..5").unwrap(), 2..5);
        assert_eq!(rows("9..").unwrap(), 9..10);
        assert_eq!(rows("..1").unwrap(), 0..1);
        assert_eq!(Rows::ALL.within(10).unwrap(), 0..10);
        assert!(rows("5..5").is_err() && rows("6..5").is_err() && rows("0..11").is_err());
        assert!("5".parse::<Rows>().is_err() && "a..b".parse::<Rows>().is_err());
        assert!(rows("4..11").unwrap_err().to_string().contains("--rows 4..11"));
    }
}

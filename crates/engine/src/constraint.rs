//! Answers that may not be just anything: the seam between a grammar and the choice of tokens.

use std::fmt::Debug;

/// The tokens that may come next: bit `id % 32` of word `id / 32`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask(Vec<u32>);

impl TokenMask {
    /// A mask of these words; tokens beyond them are not allowed.
    pub fn from_words(words: Vec<u32>) -> TokenMask {
        TokenMask(words)
    }

    /// A mask that allows these tokens.
    pub fn of(ids: impl IntoIterator<Item = u32>) -> TokenMask {
        let mut words = Vec::new();
        for id in ids {
            let word = id as usize / 32;
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (id % 32);
        }
        TokenMask(words)
    }

    /// Makes the logits of tokens it does not allow −∞; `logits` has one a token id.
    pub(crate) fn forbid(&self, logits: &mut [f32]) {
        for (index, logits) in logits.chunks_mut(32).enumerate() {
            match self.0.get(index).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                    forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }

    /// Whether it allows a token.
    pub fn allows(&self, id: u32) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

/// Says at each place of an answer which tokens may come next. The tokens that end an answer are among them exactly
/// where it may end.
pub trait Constraint: Debug + Send {
    /// The tokens that may come next.
    ///
    /// # Errors
    /// Why nothing can be said: the constraint has become too expensive. The answer fails then.
    fn mask(&mut self) -> Result<TokenMask, String>;

    /// Goes on behind a token that the mask allowed.
    ///
    /// # Errors
    /// As [`Constraint::mask`].
    fn commit(&mut self, token: u32) -> Result<(), String>;

    /// A constraint in the same place that goes its own way.
    fn fork(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Box<dyn Constraint> {
        self.fork()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_allow_what_they_were_made_of() {
        let ids = [0, 1, 31, 32, 63, 64, 1000];
        let mask = TokenMask::of(ids);
        assert!((0..2000).all(|id| mask.allows(id) == ids.contains(&id)));
        assert!(!mask.allows(u32::MAX));
        assert_eq!(TokenMask::from_words(vec![2 | 1 << 31, 1]), TokenMask::of([1, 31, 32]));
    }
}

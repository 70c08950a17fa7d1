//! Fields of a request, checked by name. Unknown ones are ignored; `null` is the same as absent.

use engine::{GenerationOptions, Sampling};
use serde_json::{Map, Value as Json};

use crate::error::ApiError;

/// Most stop texts.
const STOPS: usize = 16;
/// Most answers to one prompt.
const ANSWERS: usize = 16;

/// The object a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'r>(pub(crate) &'r Map<String, Json>);

impl<'r> Fields<'r> {
    /// The body of a request.
    pub(crate) fn of(body: &'r Json) -> Result<Fields<'r>, ApiError> {
        body.as_object().map(Fields).ok_or_else(|| ApiError::request("the body is not a JSON object"))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'r Json> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&self, name: &str) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(false),
            Some(value) => {
                value.as_bool().ok_or_else(|| ApiError::field(name, format!("{name} is not a boolean")))
            }
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        let number = |value: &Json| {
            value.as_f64().ok_or_else(|| ApiError::field(name, format!("{name} is not a number")))
        };
        self.get(name).map(number).transpose()
    }

    pub(crate) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let whole = |value: &Json| {
            let whole =
                value.as_i64().or_else(|| value.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as i64));
            whole.ok_or_else(|| ApiError::field(name, format!("{name} is not a whole number")))
        };
        self.get(name).map(whole).transpose()
    }

    /// A text, or a list of texts.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>, ApiError> {
        let bad = || ApiError::field(name, format!("{name} is neither a text nor a list of texts"));
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Json::String(text)) => Ok(vec![text.clone()]),
            Some(Json::Array(items)) => {
                items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(bad)).collect()
            }
            Some(_) => Err(bad()),
        }
    }

    /// Answers wanted to each prompt.
    pub(crate) fn answers(&self) -> Result<usize, ApiError> {
        match self.integer("n")?.unwrap_or(1) {
            n if (1..=ANSWERS as i64).contains(&n) => Ok(n as usize),
            n => Err(ApiError::field("n", format!("n is {n}; expected 1 to {ANSWERS}"))),
        }
    }

    /// How answers are chosen. `room` is what the context has left behind the prompt.
    pub(crate) fn generation(&self, room: usize) -> Result<GenerationOptions, ApiError> {
        let stop = self.texts("stop")?;
        if stop.len() > STOPS || stop.iter().any(String::is_empty) {
            return Err(ApiError::field(
                "stop",
                format!("stop wants at most {STOPS} texts, none of them empty"),
            ));
        }
        let limit = match self.integer("max_completion_tokens")? {
            None => self.integer("max_tokens")?,
            limit => limit,
        };
        // -1 is what some clients send for "no limit". The last token needs no room: nothing is read after it.
        let most = room.saturating_add(1);
        let max_tokens =
            limit.and_then(|limit| usize::try_from(limit).ok()).map_or(most, |limit| limit.min(most));
        let options = GenerationOptions {
            sampling: self.sampling()?,
            max_tokens,
            stop,
            ignore_eos: self.bool("ignore_eos")?,
            logprobs: None,
            constraint: None,
        };
        options.sampling.check()?;
        Ok(options)
    }

    fn sampling(&self) -> Result<Sampling, ApiError> {
        let usual = Sampling::default();
        let number =
            |name: &str, usual: f32| Ok::<f32, ApiError>(self.number(name)?.map_or(usual, |x| x as f32));
        let repeat = match self.number("repeat_penalty")? {
            None => self.number("repetition_penalty")?,
            given => given,
        };
        let seed = match self.integer("seed")? {
            Some(seed) if seed >= 0 => seed as u64,
            _ => any_seed(),
        };
        Ok(Sampling {
            temperature: number("temperature", usual.temperature)?,
            top_k: self.integer("top_k")?.map_or(usual.top_k, |k| usize::try_from(k).unwrap_or(0)),
            top_p: number("top_p", usual.top_p)?.max(f32::MIN_POSITIVE),
            min_p: number("min_p", usual.min_p)?,
            presence_penalty: number("presence_penalty", 0.0)?,
            frequency_penalty: number("frequency_penalty", 0.0)?,
            repeat_penalty: repeat.map_or(1.0, |x| x as f32),
            seed,
        })
    }
}

/// A seed nobody asked for.
fn any_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

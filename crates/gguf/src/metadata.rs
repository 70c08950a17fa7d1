//! The key-value pairs of a file, with typed getters.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, label};
use crate::value::{Array, Strings, Value};

/// Metadata of a model, in the order of the file.
///
/// The typed getters return `Ok(None)` for an absent key, and an error that names key and types for one
/// of another type. Integer getters accept any integer type whose value fits: converters differ in the
/// widths they choose.
#[derive(Clone, Debug)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
    /// The file that errors name.
    origin: PathBuf,
}

impl Default for Metadata {
    fn default() -> Metadata {
        Metadata::new()
    }
}

/// Equal keys and values in equal order; where they came from does not matter.
impl PartialEq for Metadata {
    fn eq(&self, other: &Metadata) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    /// No entries, not from a file.
    pub fn new() -> Metadata {
        Metadata::of_file(Path::new("(memory)"))
    }

    /// No entries yet; errors will name `path`.
    pub(crate) fn of_file(path: &Path) -> Metadata {
        Metadata { entries: Vec::new(), index: HashMap::new(), origin: path.to_owned() }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether the key is present, whatever its type.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    /// Sets a key: in its place if present, else at the end.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.index.get(&key) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    /// Removes a key and returns its value; the order of the others stays.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.index.remove(key)?;
        for position in self.index.values_mut().filter(|position| **position > at) {
            *position -= 1;
        }
        Some(self.entries.remove(at).1)
    }

    /// An integer of any type that fits `u32`.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.integer(key, "u32")
    }

    /// An integer of any type that fits `u64`.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.integer(key, "u64")
    }

    /// An integer of any type that fits `i64`.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, Error> {
        self.integer(key, "i64")
    }

    /// An `f32`, or an `f64` rounded to one.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(v)) => Ok(Some(*v)),
            Some(Value::F64(v)) => Ok(Some(*v as f32)),
            Some(other) => Err(self.wrong_type(key, "f32", other)),
        }
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(self.wrong_type(key, "bool", other)),
        }
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.wrong_type(key, "string", other)),
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::String(v))) => Ok(Some(v)),
            Some(other) => Err(self.wrong_type(key, "array of string", other)),
        }
    }

    /// An array of integers of any type whose values fit `i64`.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else {
            return Err(self.wrong_type(key, "array of integers", value));
        };
        let ints = match array {
            Array::U8(v) => widen(v),
            Array::I8(v) => widen(v),
            Array::U16(v) => widen(v),
            Array::I16(v) => widen(v),
            Array::U32(v) => widen(v),
            Array::I32(v) => widen(v),
            Array::I64(v) => v.clone(),
            Array::U64(v) => {
                let fit = v.iter().map(|&v| i64::try_from(v).map_err(|_| self.out_of_range(key, "i64", v)));
                fit.collect::<Result<_, _>>()?
            }
            _ => return Err(self.wrong_type(key, "array of integers", value)),
        };
        Ok(Some(ints))
    }

    /// An array of `f32`, or of `f64` rounded to it.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(v))) => Ok(Some(v.clone())),
            Some(Value::Array(Array::F64(v))) => Ok(Some(v.iter().map(|&v| v as f32).collect())),
            Some(other) => Err(self.wrong_type(key, "array of f32", other)),
        }
    }

    /// An array of bools.
    pub fn bools(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Bool(v))) => Ok(Some(v)),
            Some(other) => Err(self.wrong_type(key, "array of bool", other)),
        }
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(integer) = value.as_integer() else { return Err(self.wrong_type(key, expected, value)) };
        T::try_from(integer).map(Some).map_err(|_| self.out_of_range(key, expected, integer))
    }

    fn wrong_type(&self, key: &str, expected: &'static str, found: &Value) -> Error {
        let kind = ErrorKind::WrongType { key: label(key), expected, found: found.type_name() };
        Error::new(&self.origin, kind)
    }

    fn out_of_range(&self, key: &str, expected: &'static str, found: impl ToString) -> Error {
        let kind = ErrorKind::OutOfRange { key: label(key), expected, found: found.to_string() };
        Error::new(&self.origin, kind)
    }
}

fn widen<T: Copy + Into<i64>>(values: &[T]) -> Vec<i64> {
    values.iter().map(|&v| v.into()).collect()
}

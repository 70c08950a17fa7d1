//! Character classes the pre-tokenizers split by: \p{L}, \p{M}, \p{N}, White_Space, and the rest.

use std::sync::LazyLock;

use crate::unicode_table::{LETTERS, MARKS, NUMBERS};

/// Class of a character; the five are disjoint and cover everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Class {
    /// None of the others: punctuation, symbols, control characters, unassigned.
    Other,
    /// General category L.
    Letter,
    /// General category M.
    Mark,
    /// General category N.
    Number,
    /// White_Space, line ends included.
    Space,
}

/// Code points below this have their class in a flat table; above, only variation selectors (marks) and
/// unassigned ones follow.
const FLAT: usize = 0x3_4000;

/// One class per code point: a run of CJK text then costs one load per character. Filled once, in well under
/// a millisecond.
static CLASSES: LazyLock<Box<[Class]>> = LazyLock::new(|| {
    let mut classes = vec![Class::Other; FLAT].into_boxed_slice();
    for (ranges, class) in [(LETTERS, Class::Letter), (MARKS, Class::Mark), (NUMBERS, Class::Number)] {
        for &(first, last) in ranges {
            let end = (last as usize + 1).min(FLAT);
            classes[(first as usize).min(end)..end].fill(class);
        }
    }
    // All white space lies in the first planes; the standard library has the property.
    for (code, class) in classes.iter_mut().enumerate().take(0x3001) {
        if char::from_u32(code as u32).is_some_and(char::is_whitespace) {
            *class = Class::Space;
        }
    }
    classes
});

/// The classes of ASCII, in two cache lines.
static ASCII: [Class; 128] = {
    let mut classes = [Class::Other; 128];
    let mut byte = 0;
    while byte < 128 {
        classes[byte as usize] = match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
            b'0'..=b'9' => Class::Number,
            b'\t'..=b'\r' | b' ' => Class::Space,
            _ => Class::Other,
        };
        byte += 1;
    }
    classes
};

/// Looks classes up without checking each time that the table is filled.
#[derive(Clone, Copy)]
pub(crate) struct Classes(&'static [Class]);

impl Classes {
    pub(crate) fn get() -> Classes {
        Classes(&CLASSES)
    }

    /// The class of an ASCII character; no mark is one.
    #[inline]
    pub(crate) fn of_ascii(self, byte: u8) -> Class {
        ASCII[usize::from(byte & 0x7F)]
    }

    #[inline]
    pub(crate) fn of(self, c: char) -> Class {
        match self.0.get(c as usize) {
            Some(&class) => class,
            None => beyond(c),
        }
    }
}

/// The class of a code point above the flat table.
#[cold]
fn beyond(c: char) -> Class {
    let within = |ranges: &[(u32, u32)]| {
        let after = ranges.partition_point(|&(first, _)| first <= c as u32);
        after > 0 && c as u32 <= ranges[after - 1].1
    };
    match () {
        () if within(LETTERS) => Class::Letter,
        () if within(MARKS) => Class::Mark,
        () if within(NUMBERS) => Class::Number,
        () => Class::Other,
    }
}

#[cfg(test)]
mod tests {
    use regex_syntax::hir::{Class as HirClass, HirKind};

    use super::*;

    /// Ranges of a Unicode property as `regex-syntax` has it.
    fn property(pattern: &str) -> Vec<(u32, u32)> {
        let hir = regex_syntax::parse(pattern).expect("a class");
        let HirKind::Class(HirClass::Unicode(class)) = hir.into_kind() else { panic!("not a class") };
        class.ranges().iter().map(|range| (range.start() as u32, range.end() as u32)).collect()
    }

    fn source() -> String {
        let mut source = String::from(
            "//! Generated from the Unicode Character Database by the test `unicode::tests::table_is_current`, which also\n\
             //! writes this file anew when `REDLITE_WRITE_UNICODE_TABLE` is set. Do not edit.\n",
        );
        for (name, category) in [("LETTERS", "L"), ("MARKS", "M"), ("NUMBERS", "N")] {
            source +=
                &format!("\n/// General category {category}, as inclusive ranges in ascending order.\n");
            source += &format!("#[rustfmt::skip]\npub(crate) const {name}: &[(u32, u32)] = &[\n");
            for row in property(&format!(r"\p{{{category}}}")).chunks(5) {
                let row: Vec<String> = row.iter().map(|(a, b)| format!("({a:#x}, {b:#x}),")).collect();
                source += &format!("    {}\n", row.join(" "));
            }
            source += "];\n";
        }
        source
    }

    #[test]
    fn table_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/unicode_table.rs");
        if std::env::var_os("REDLITE_WRITE_UNICODE_TABLE").is_some() {
            std::fs::write(path, source()).expect("written");
            return;
        }
        assert!(std::fs::read_to_string(path).expect("the table") == source(), "unicode_table.rs is stale");
    }

    #[test]
    fn every_character_has_the_class_of_its_properties() {
        let mut expected = vec![Class::Other; 0x11_0000];
        let properties = [
            (r"\p{L}", Class::Letter),
            (r"\p{M}", Class::Mark),
            (r"\p{N}", Class::Number),
            (r"\s", Class::Space),
        ];
        for (pattern, class) in properties {
            for (first, last) in property(pattern) {
                expected[first as usize..=last as usize].fill(class);
            }
        }
        let classes = Classes::get();
        for c in (0..0x11_0000).filter_map(char::from_u32) {
            assert_eq!(classes.of(c), expected[c as usize], "U+{:04X}", c as u32);
            if c.is_ascii() {
                assert_eq!(classes.of_ascii(c as u8), expected[c as usize], "{c:?}");
            }
        }
    }
}

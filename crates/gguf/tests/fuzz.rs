//! A short, deterministic run of the fuzzer's checks, for every test run.

use std::fs;

mod common;
use common::check::parse_and_check;

/// SplitMix64: enough randomness for mutations, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Numbers that break careless arithmetic.
const AWKWARD: [u64; 16] = [
    0,
    1,
    2,
    3,
    8,
    9,
    31,
    33,
    255,
    1 << 16,
    1 << 31,
    u32::MAX as u64,
    1 << 40,
    1 << 60,
    i64::MAX as u64,
    u64::MAX,
];

fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..1 + random.below(4) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        let len = 1 + random.below((bytes.len() - at).min(40));
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 | 3 => {
                let width = [4, 8][random.below(2)].min(bytes.len() - at);
                let value = AWKWARD[random.below(AWKWARD.len())].to_le_bytes();
                bytes[at..at + width].copy_from_slice(&value[..width]);
            }
            4 => bytes.truncate(at),
            5 => drop(bytes.drain(at..at + len)),
            6 => {
                let piece = bytes[at..at + len].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let other = &seeds[random.below(seeds.len())];
                if !other.is_empty() {
                    bytes.truncate(at);
                    bytes.extend(&other[random.below(other.len())..]);
                }
            }
        }
    }
    bytes
}

#[test]
fn mutated_files_are_read_or_refused_but_nothing_else() {
    let mut seeds = vec![common::Raw::small().bytes()];
    for folder in ["corpus", "fixtures"] {
        for entry in fs::read_dir(common::folder(folder)).unwrap() {
            seeds.push(fs::read(entry.unwrap().path()).unwrap());
        }
    }
    let valid: Vec<Vec<u8>> = seeds.iter().filter(|seed| parse_and_check(seed)).cloned().collect();
    assert!(valid.len() >= 2 && valid.len() < seeds.len(), "both kinds of seeds are there");

    let mut random = Random(20);
    let mut accepted = 0;
    for round in 0..100_000 {
        // Mutations of valid files go deepest.
        let from = if round % 4 == 0 { &seeds } else { &valid };
        accepted += usize::from(parse_and_check(&mutate(from, &mut random)));
    }
    // Else the mutations are too wild to reach anything.
    assert!((1_000..99_000).contains(&accepted), "{accepted} accepted");
}

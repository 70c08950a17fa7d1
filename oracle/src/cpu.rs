//! Does the compiled llama.cpp use what this CPU offers?

/// Instruction sets that this CPU reports: (llama.cpp's name for it, present).
#[cfg(target_arch = "x86_64")]
fn detected() -> Vec<(&'static str, bool)> {
    vec![
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("FMA", is_x86_feature_detected!("fma")),
        ("F16C", is_x86_feature_detected!("f16c")),
        ("AVX512", is_x86_feature_detected!("avx512f")),
        ("AVX512_VBMI", is_x86_feature_detected!("avx512vbmi")),
        ("AVX512_VNNI", is_x86_feature_detected!("avx512vnni")),
        ("AVX512_BF16", is_x86_feature_detected!("avx512bf16")),
    ]
}

/// Instruction sets that this CPU reports; none are checked off x86-64.
#[cfg(not(target_arch = "x86_64"))]
fn detected() -> Vec<(&'static str, bool)> {
    Vec::new()
}

/// Does llama.cpp's system information report `name` as on? Entries look like
/// `AVX2 = 1`, separated by `|`; the first follows `CPU : `.
pub fn reports(system_info: &str, name: &str) -> bool {
    system_info.split(['|', ':']).any(|entry| {
        entry.split_once('=').is_some_and(|(key, value)| key.trim() == name && value.trim() == "1")
    })
}

/// Names of the instruction sets that this CPU has and the library, by its
/// system information, was not compiled to use.
pub fn unused(system_info: &str) -> Vec<&'static str> {
    missing(system_info, &detected())
}

fn missing(system_info: &str, cpu: &[(&'static str, bool)]) -> Vec<&'static str> {
    cpu.iter().filter(|(name, has)| *has && !reports(system_info, name)).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NATIVE: &str = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | ";
    const GENERIC: &str = "CPU : SSE3 = 1 | LLAMAFILE = 1 | ";

    #[test]
    fn a_generic_library_on_a_vnni_cpu_is_noticed() {
        let cpu = [("AVX2", true), ("AVX512_VNNI", true), ("AVX512_BF16", false)];
        assert_eq!(missing(GENERIC, &cpu), ["AVX2", "AVX512_VNNI"]);
        assert!(missing(NATIVE, &cpu).is_empty());
    }

    #[test]
    fn a_name_is_matched_whole_and_only_when_on() {
        assert!(reports(NATIVE, "SSE3"));
        assert!(!reports("CPU : AVX512_VNNI = 1 | ", "AVX512"));
        assert!(!reports("CPU : AVX512_VNNI = 0 | ", "AVX512_VNNI"));
    }
}

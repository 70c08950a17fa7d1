//! Folders of the user's, where the XDG rules put them.

use std::path::PathBuf;

/// For files worth keeping: `$XDG_DATA_HOME/redlite`, or `~/.local/share/redlite`.
pub fn data() -> Option<PathBuf> {
    folder("XDG_DATA_HOME", ".local/share")
}

/// For what can be made again: `$XDG_CACHE_HOME/redlite`, or `~/.cache/redlite`.
pub fn cache() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME", ".cache")
}

/// For what was done last: `$XDG_STATE_HOME/redlite`, or `~/.local/state/redlite`.
pub fn state() -> Option<PathBuf> {
    folder("XDG_STATE_HOME", ".local/state")
}

fn folder(variable: &str, default: &str) -> Option<PathBuf> {
    // Relative paths in these variables do not count, say the rules.
    let named = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(default));
    Some(named.or_else(home)?.join("redlite"))
}

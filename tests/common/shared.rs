//! Reference data that is not in the repository: beside it, or where HOTSET_SHARED says.

use std::path::{Path, PathBuf};

/// The file or folder of that name, or `None`, which is said.
pub fn shared(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let path = std::env::var_os("HOTSET_SHARED").map_or_else(beside, PathBuf::from).join(name);
    if !path.exists() {
        println!("skipped: {name} is not there (HOTSET_SHARED)");
        return None;
    }
    Some(path)
}

//! What sandboxes could leave behind on a machine.

/// Processes that carry a sandbox of this folder in their arguments, environment or working directory.
pub fn processes(folder: &std::path::Path) -> Vec<String> {
    let needle = folder.to_str().unwrap().as_bytes();
    let holds = |path: std::path::PathBuf| std::fs::read(path).is_ok_and(|bytes| bytes.windows(needle.len()).any(|part| part == needle));
    let entries = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let found = entries.filter(|path| {
        let inside = std::fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
        inside || holds(path.join("cmdline")) || holds(path.join("environ"))
    });
    found
        .map(|path| {
            format!(
                "{}: {}",
                path.display(),
                std::fs::read_to_string(path.join("cmdline")).unwrap_or_default()
            )
        })
        .collect()
}

/// How many there are in this namespace.
pub fn mounts() -> usize {
    std::fs::read_to_string("/proc/self/mounts").unwrap().lines().count()
}

/// Control groups that hold the name of a trial's sandbox.
pub fn groups() -> Vec<String> {
    groups_of("trial_")
}

/// Control groups with this in their names.
pub fn groups_of(part: &str) -> Vec<String> {
    fn walk(folder: &std::path::Path, part: &str, found: &mut Vec<String>, depth: u32) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().contains(part)) {
                found.push(path.display().to_string());
            } else if depth > 0 {
                walk(&path, part, found, depth - 1);
            }
        }
    }
    let mut found = Vec::new();
    walk(std::path::Path::new("/sys/fs/cgroup"), part, &mut found, 4);
    found
}

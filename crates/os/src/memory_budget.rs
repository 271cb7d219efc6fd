//! How much memory this process may still take, judged before it is taken.
//!
//! A cgroup over its limit kills instead of refusing, so a size is compared with what is left first.
//! Read are the memory limits of the process's cgroup and of all its parents, in the v2 and in the v1
//! hierarchy, and the machine's `MemAvailable`. Page cache that the kernel would drop counts as free.
//! What cannot be read does not limit.

use std::fmt;
use std::path::{Path, PathBuf};

/// What sets the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitedBy {
    /// `MemAvailable` of the machine.
    Machine,
    /// The memory limit of the cgroup with this folder.
    Cgroup(PathBuf),
    /// A limit that whoever started this program set, by the name of the setting.
    Setting(&'static str),
}

impl fmt::Display for LimitedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("the machine"),
            Self::Cgroup(folder) => write!(f, "the memory limit of cgroup {}", folder.display()),
            Self::Setting(name) => write!(f, "the setting {name}"),
        }
    }
}

/// Memory that can still be taken, and what sets that limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// Bytes left.
    pub bytes: u64,
    /// What would run out first.
    pub limited_by: LimitedBy,
}

/// More memory was wanted than is left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} needs {needed_bytes} bytes of memory, but only {available_bytes} are available ({limited_by})"
)]
pub struct NotEnoughMemory {
    /// What the memory was for.
    pub what: String,
    /// Bytes wanted.
    pub needed_bytes: u64,
    /// Bytes left.
    pub available_bytes: u64,
    /// What sets the limit.
    pub limited_by: LimitedBy,
}

/// Compares `needed_bytes` with what this process may still take.
///
/// # Errors
/// [`NotEnoughMemory`], with both numbers, if it is more.
pub fn check(what: &str, needed_bytes: u64) -> Result<(), NotEnoughMemory> {
    match available() {
        Some(available) => available.check(what, needed_bytes),
        None => Ok(()),
    }
}

/// What this process may still take; `None` if the system tells nothing (no `/proc`).
pub fn available() -> Option<Available> {
    available_under(Path::new("/"))
}

impl Available {
    /// Compares `needed_bytes`, wanted for `what`, with this.
    ///
    /// # Errors
    /// [`NotEnoughMemory`], with both numbers, if it is more.
    pub fn check(&self, what: &str, needed_bytes: u64) -> Result<(), NotEnoughMemory> {
        if needed_bytes <= self.bytes {
            return Ok(());
        }
        Err(NotEnoughMemory {
            what: what.to_owned(),
            needed_bytes,
            available_bytes: self.bytes,
            limited_by: self.limited_by.clone(),
        })
    }
}

/// The same for a system whose files lie below `root`.
fn available_under(root: &Path) -> Option<Available> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let machine = read("proc/meminfo")
        .and_then(|text| parse_mem_available(&text))
        .map(|bytes| Available {
            bytes,
            limited_by: LimitedBy::Machine,
        });
    let mounts = read("proc/self/mountinfo")
        .map(|text| parse_cgroup_mounts(&text))
        .unwrap_or_default();
    let memberships = read("proc/self/cgroup").unwrap_or_default();
    let cgroups = mounts.iter().flat_map(|mount| {
        let member = parse_membership(&memberships, mount.version).unwrap_or_default();
        mount.folders_up(&member).into_iter().filter_map(|folder| {
            let bytes = mount
                .version
                .left_in(&root.join(folder.strip_prefix("/").ok()?))?;
            Some(Available {
                bytes,
                limited_by: LimitedBy::Cgroup(folder),
            })
        })
    });
    machine
        .into_iter()
        .chain(cgroups)
        .min_by_key(|available| available.bytes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Bytes left below the limit of the cgroup in `folder`; `None` without a limit.
    fn left_in(self, folder: &Path) -> Option<u64> {
        let (limit, usage, cache_key) = match self {
            Self::V1 => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
            Self::V2 => ("memory.max", "memory.current", "inactive_file"),
        };
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let limit_bytes = parse_limit(&read(limit)?)?;
        let used_bytes: u64 = read(usage)?.trim().parse().ok()?;
        let cache_bytes = read("memory.stat")
            .and_then(|text| parse_stat(&text, cache_key))
            .unwrap_or(0);
        Some(limit_bytes.saturating_sub(used_bytes.saturating_sub(cache_bytes)))
    }
}

/// A mounted cgroup hierarchy that can limit memory.
#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    version: Version,
    /// The cgroup shown at the mount point (not `/` inside many containers).
    shown: PathBuf,
    mount_point: PathBuf,
}

impl CgroupMount {
    /// The folders of cgroup `member` and of all its parents that this mount shows, deepest first.
    fn folders_up(&self, member: &Path) -> Vec<PathBuf> {
        // A member outside the shown part is seen by a container without a cgroup namespace: what it
        // finds at the mount point itself is then its own cgroup.
        let below = member.strip_prefix(&self.shown).unwrap_or(Path::new(""));
        let own = below
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        let deepest = if own {
            self.mount_point.join(below)
        } else {
            self.mount_point.clone()
        };
        deepest
            .ancestors()
            .take_while(|folder| folder.starts_with(&self.mount_point))
            .map(Into::into)
            .collect()
    }
}

/// `MemAvailable` of `/proc/meminfo` in bytes.
fn parse_mem_available(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.split_ascii_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The hierarchies of `/proc/self/mountinfo` that can limit memory.
fn parse_cgroup_mounts(text: &str) -> Vec<CgroupMount> {
    let parse = |line: &str| {
        // "32 25 0:29 /root /mount/point options [tags] - type source super-options", see proc(5).
        let (mount, kind) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (shown, mount_point) = (mount.next()?, mount.next()?);
        let mut kind = kind.split(' ');
        let (fs_type, _source, options) = (kind.next()?, kind.next()?, kind.next().unwrap_or(""));
        let version = match fs_type {
            "cgroup2" => Version::V2,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::V1,
            _ => return None,
        };
        Some(CgroupMount {
            version,
            shown: unescape(shown),
            mount_point: unescape(mount_point),
        })
    };
    text.lines().filter_map(parse).collect()
}

/// Mountinfo writes blanks and backslashes of paths as `\ooo`.
fn unescape(text: &str) -> PathBuf {
    let path = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    path.iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
        .into()
}

/// The cgroup that `/proc/self/cgroup` names for the hierarchy of this version.
fn parse_membership(text: &str, version: Version) -> Option<PathBuf> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let found = match version {
            Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
            Version::V2 => id == "0" && controllers.is_empty(),
        };
        found.then(|| path.into())
    })
}

/// A limit file; `None` for "no limit" (`max`, or v1's largest page-rounded number).
fn parse_limit(text: &str) -> Option<u64> {
    let bytes: u64 = text.trim().parse().ok()?;
    (bytes < i64::MAX as u64 / 2).then_some(bytes)
}

/// The value of `key` in a `memory.stat` file.
fn parse_stat(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lines of a machine with both hierarchies mounted (systemd hybrid layout, Linux 6.18).
    const HYBRID_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const HYBRID_MEMBERSHIP: &str = "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/\n0::/user.slice\n";

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn meminfo_gives_the_available_bytes() {
        let text = "MemTotal:       24684092 kB\nMemFree:        23567192 kB\nMemAvailable:   24299520 kB\n";
        assert_eq!(parse_mem_available(text), Some(24_299_520 * 1024));
        assert_eq!(parse_mem_available("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn both_hierarchies_are_found_among_the_mounts() {
        let mount = |version, mount_point: &str| CgroupMount {
            version,
            shown: "/".into(),
            mount_point: mount_point.into(),
        };
        let expected = [
            mount(Version::V1, "/sys/fs/cgroup/memory"),
            mount(Version::V2, "/sys/fs/cgroup/unified"),
        ];
        assert_eq!(parse_cgroup_mounts(HYBRID_MOUNTS), expected);
        assert_eq!(
            parse_membership(HYBRID_MEMBERSHIP, Version::V1),
            Some("/jobs/7".into())
        );
        assert_eq!(
            parse_membership(HYBRID_MEMBERSHIP, Version::V2),
            Some("/user.slice".into())
        );
        assert_eq!(parse_cgroup_mounts("nonsense\n1 2 3 - cgroup2"), []);
    }

    #[test]
    fn unlimited_groups_do_not_limit() {
        assert_eq!(parse_limit("max\n"), None);
        // What v1 shows without a limit on pages of 4 KiB.
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(1 << 30));
    }

    #[test]
    fn the_nearest_limit_of_all_parents_counts_in_v2() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(root, "proc/meminfo", "MemAvailable:   24299520 kB\n");
        write(
            root,
            "proc/self/mountinfo",
            "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        write(root, "proc/self/cgroup", "0::/pod/container\n");
        write(root, "sys/fs/cgroup/pod/memory.max", "1000000\n");
        write(root, "sys/fs/cgroup/pod/memory.current", "700000\n");
        write(
            root,
            "sys/fs/cgroup/pod/memory.stat",
            "anon 1\ninactive_file 100000\nactive_file 5\n",
        );
        write(root, "sys/fs/cgroup/pod/container/memory.max", "max\n");
        write(root, "sys/fs/cgroup/pod/container/memory.current", "600000\n");
        let available = available_under(root).unwrap();
        assert_eq!(available.bytes, 400_000);
        assert_eq!(
            available.limited_by,
            LimitedBy::Cgroup("/sys/fs/cgroup/pod".into())
        );
        assert_eq!(available.check("the arena", 400_000), Ok(()));
        let error = available.check("the arena", 400_001).unwrap_err();
        assert_eq!((error.needed_bytes, error.available_bytes), (400_001, 400_000));
        assert_eq!(
            error.to_string(),
            "the arena needs 400001 bytes of memory, but only 400000 are available \
             (the memory limit of cgroup /sys/fs/cgroup/pod)"
        );
    }

    #[test]
    fn v1_limits_count_beside_an_unlimited_v2() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(root, "proc/meminfo", "MemAvailable:   24299520 kB\n");
        write(root, "proc/self/mountinfo", HYBRID_MOUNTS);
        write(root, "proc/self/cgroup", HYBRID_MEMBERSHIP);
        write(
            root,
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes",
            "2000000\n",
        );
        write(
            root,
            "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes",
            "500000\n",
        );
        let available = available_under(root).unwrap();
        assert_eq!(available.bytes, 1_500_000);
        assert_eq!(
            available.limited_by,
            LimitedBy::Cgroup("/sys/fs/cgroup/memory/jobs/7".into())
        );
    }

    #[test]
    fn a_container_that_is_shown_only_its_own_group_finds_its_limit() {
        let mount = CgroupMount {
            version: Version::V1,
            shown: "/docker/abc".into(),
            mount_point: "/sys/fs/cgroup/memory".into(),
        };
        assert_eq!(
            mount.folders_up(Path::new("/docker/abc")),
            [PathBuf::from("/sys/fs/cgroup/memory")]
        );
        assert_eq!(
            mount.folders_up(Path::new("/other")),
            [PathBuf::from("/sys/fs/cgroup/memory")]
        );
        assert_eq!(
            mount.folders_up(Path::new("/../x")),
            [PathBuf::from("/sys/fs/cgroup/memory")]
        );
    }

    #[test]
    fn without_any_cgroup_the_machine_limits() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "proc/meminfo", "MemAvailable:       8 kB\n");
        let expected = Available {
            bytes: 8192,
            limited_by: LimitedBy::Machine,
        };
        assert_eq!(available_under(root.path()), Some(expected));
        assert_eq!(available_under(&root.path().join("absent")), None);
    }

    #[test]
    fn this_machine_grants_a_page_and_refuses_the_impossible() {
        check("a page", 4096).unwrap();
        let error = check("everything", u64::MAX).unwrap_err();
        assert!(error.available_bytes > 0 && error.needed_bytes == u64::MAX);
    }
}

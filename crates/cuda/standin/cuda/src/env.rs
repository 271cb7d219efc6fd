//! What the environment says: how many devices, how much memory, which mishaps.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

fn number(name: &str, otherwise: usize) -> usize {
    let value = std::env::var(name).ok();
    value.and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// `FAKECUDA_DEVICES`, 2 unless set, at most [`MAX_DEVICES`].
pub(crate) static N_DEVICES: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_DEVICES", 2).min(MAX_DEVICES));
/// `FAKECUDA_MEM`: bytes of each device, 2 GiB unless set.
pub(crate) static MEMORY_BYTES: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_MEM", 2 << 30));
/// `FAKECUDA_CC`: compute capability times ten, 90 unless set.
pub(crate) static COMPUTE_CAPABILITY: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_CC", 90));
/// `FAKECUDA_DELAY_US`: every job of a stream starts so much later.
pub(crate) static DELAY_US: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_DELAY_US", 0));

/// `FAKECUDA_DRIVER`: the driver's version, 13000 unless set.
pub(crate) static DRIVER: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_DRIVER", 13_000));
/// `FAKECUDA_SHARED`: most shared memory that a block may opt in for, 227 KiB unless set.
pub(crate) static OPTED_SHARED_BYTES: LazyLock<usize> = LazyLock::new(|| number("FAKECUDA_SHARED", 227 << 10));

pub(crate) const MAX_DEVICES: usize = 16;

/// What is to happen at the nth launch of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Mishap {
    /// `FAKECUDA_FAULT=<kernel>:<nth>:<code>`: it fails for good.
    Fault(i32),
    /// `FAKECUDA_HANG=<kernel>:<nth>`: it never ends.
    Hang,
    /// `FAKECUDA_SLOW_US=<kernel>:<microseconds>`: every launch of it takes so much longer.
    Slow(u64),
}

/// The mishap of this launch of `kernel`, if it has one. Counts launches from 1.
pub(crate) fn mishap(kernel: &str) -> Option<Mishap> {
    static LAUNCHES: LazyLock<Mutex<HashMap<String, usize>>> = LazyLock::new(Mutex::default);
    let parts = |name| std::env::var(name).ok().map(|value| value.split(':').map(str::to_owned).collect::<Vec<_>>());
    let fault = parts("FAKECUDA_FAULT").filter(|parts| parts[0] == kernel);
    let hang = parts("FAKECUDA_HANG").filter(|parts| parts[0] == kernel);
    let slow = parts("FAKECUDA_SLOW_US").filter(|parts| parts[0] == kernel);
    if fault.is_none() && hang.is_none() && slow.is_none() {
        return None;
    }
    let mut launches = LAUNCHES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let count = launches.entry(kernel.to_owned()).or_default();
    *count += 1;
    let at = |parts: &[String], idx: usize| parts.get(idx).and_then(|part| part.parse::<usize>().ok());
    if let Some(parts) = fault.filter(|parts| at(parts, 1) == Some(*count)) {
        return Some(Mishap::Fault(at(&parts, 2).unwrap_or(700) as i32));
    }
    if hang.is_some_and(|parts| at(&parts, 1) == Some(*count)) {
        return Some(Mishap::Hang);
    }
    slow.and_then(|parts| at(&parts, 1)).map(|us| Mishap::Slow(us as u64))
}

/// `FAKECUDA_CALL_FAULT=<entry point>:<nth>:<code>`: the nth call of it answers so, and does nothing. Counts from 1.
pub(crate) fn call_fault(name: &'static str) -> Option<i32> {
    static FAULT: LazyLock<Option<(String, usize, i32)>> = LazyLock::new(|| {
        let value = std::env::var("FAKECUDA_CALL_FAULT").ok()?;
        let mut parts = value.split(':');
        Some((parts.next()?.to_owned(), parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    });
    static N_CALLS: AtomicUsize = AtomicUsize::new(0);
    let (own, nth, code) = FAULT.as_ref()?;
    (own == name && N_CALLS.fetch_add(1, SeqCst) + 1 == *nth).then_some(*code)
}

/// Tells of the first use of each entry point, if `FAKECUDA_TRACE` is set.
pub(crate) fn trace(name: &'static str) {
    static IS_ON: LazyLock<bool> = LazyLock::new(|| std::env::var_os("FAKECUDA_TRACE").is_some());
    static SEEN: LazyLock<Mutex<BTreeSet<&'static str>>> = LazyLock::new(Mutex::default);
    if *IS_ON && SEEN.lock().is_ok_and(|mut seen| seen.insert(name)) {
        eprintln!("fakecuda: {name}");
    }
}

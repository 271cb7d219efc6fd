//! A fork-join pool: `n_threads - 1` workers and the calling thread share numbered tasks.
//!
//! Knows nothing of tensors. One pool per backend; several pools of one process do not know of each other.
//! R1. The job is written only while the state is closed and nobody is inside; it is read only by those inside.
//! R2. A worker is inside from its successful step from `open` (one more inside) until its step out; the caller returns from
//!     [`Pool::run`] only after it has closed the state and nobody is inside, so a job never outlives the borrow behind it.
//! R3. A worker that wakes too late finds the state closed and waits for the next job: nobody waits for a sleeper.
//! R4. Waiting spins for about [`SPIN`], then parks; an idle pool uses no CPU.
//! R5. A panic in a task ends no thread: it is caught, the other tasks run, and [`Pool::run`] reports it.

use std::{
    cell::UnsafeCell,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{
            AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

/// How long a waiting thread spins before it parks: longer than the serial stretches inside an op, shorter than a time slice.
const SPIN: Duration = Duration::from_micros(20);

/// Most threads of a pool: the number inside must fit its part of the state.
pub(crate) const MAX_THREADS: usize = 1024;

/// A task; gets its number and the number of the thread that runs it, below [`Pool::n_threads`].
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

// The state: how many workers are inside, whether they may enter, whether they shall end, and the number of the job.
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const ENDED: u64 = 1 << 17;
const ONE_JOB: u64 = 1 << 32;

struct Job {
    task: *const Task<'static>,
    n_tasks: usize,
}

struct Shared {
    state: AtomicU64,
    next_task: AtomicUsize,
    job: UnsafeCell<Job>,
    caller: Thread,
    panic: Mutex<Option<String>>,
}

// SAFETY: R1 and R2 order all accesses to `job` by `state`; everything else is Sync by itself.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only under R2.
unsafe impl Send for Shared {}

/// See the module. Belongs to the thread that made it.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The caller is unparked by the workers, so it is always the same thread.
    _not_send: PhantomData<Rc<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.n_threads())
    }
}

/// A task panicked; the text is the panic's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskPanicked(pub(crate) String);

impl Pool {
    /// `n_threads` threads in all, the calling one included.
    pub(crate) fn new(n_threads: usize) -> std::io::Result<Self> {
        let nothing: &Task<'static> = &|_, _| {};
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next_task: AtomicUsize::new(0),
            job: UnsafeCell::new(Job {
                task: nothing,
                n_tasks: 0,
            }),
            caller: std::thread::current(),
            panic: Mutex::new(None),
        });
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            _not_send: PhantomData,
        };
        for thread_idx in 1..n_threads.min(MAX_THREADS) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{thread_idx}"));
            // On failure the workers so far are ended and joined by the drop of `pool`.
            pool.workers
                .push(builder.spawn(move || work(&shared, thread_idx))?);
        }
        Ok(pool)
    }

    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0..n_tasks)` on all threads and waits for all of them. Tasks must not call `run`.
    pub(crate) fn run(&self, n_tasks: usize, task: &Task<'_>) -> Result<(), TaskPanicked> {
        let shared = &*self.shared;
        if n_tasks <= 1 || self.workers.is_empty() {
            for task_idx in 0..n_tasks {
                attempt(shared, task, task_idx, 0);
            }
            return take_panic(shared);
        }
        let task_ptr: *const Task<'_> = task;
        // SAFETY: only the lifetime changes; R2 ends all uses before `run` returns.
        let task_ptr = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task_ptr) };
        // SAFETY: R1: the state is closed and nobody is inside since the last `run` (or ever).
        unsafe {
            *shared.job.get() = Job {
                task: task_ptr,
                n_tasks,
            }
        };
        shared.next_task.store(0, Relaxed);
        // Pairs with the step in: job published.
        let job_idx = shared.state.load(Relaxed) & !(ONE_JOB - 1);
        shared.state.store(job_idx.wrapping_add(ONE_JOB) | OPEN, Release);
        for worker in self.workers.iter().take(n_tasks - 1) {
            worker.thread().unpark();
        }
        take_tasks(shared, task, n_tasks, 0);
        shared.state.fetch_and(!OPEN, AcqRel);
        // Pairs with the step out: the workers' results are visible.
        wait_until(|| shared.state.load(Acquire) & INSIDE == 0);
        take_panic(shared)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(ENDED, Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Tasks' panics are caught, so the thread ended in good order.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, thread_idx: usize) {
    let mut last_job = 0;
    loop {
        wait_until(|| {
            let state = shared.state.load(Relaxed);
            state & ENDED != 0 || (state & OPEN != 0 && state / ONE_JOB != last_job)
        });
        let state = shared.state.load(Relaxed);
        if state & ENDED != 0 {
            return;
        }
        if state & OPEN == 0 || state / ONE_JOB == last_job {
            continue;
        }
        // Step in. Pairs with the publication in `run`.
        if shared
            .state
            .compare_exchange(state, state + 1, AcqRel, Relaxed)
            .is_err()
        {
            continue;
        }
        last_job = state / ONE_JOB;
        // SAFETY: R1: inside, hence the job is not written.
        let (task, n_tasks) = unsafe { ((*shared.job.get()).task, (*shared.job.get()).n_tasks) };
        // SAFETY: R2: `run` has not returned, so the task that it borrows lives.
        let task = unsafe { &*task };
        take_tasks(shared, task, n_tasks, thread_idx);
        // Step out. Pairs with the wait in `run`.
        let before = shared.state.fetch_sub(1, AcqRel);
        if before & INSIDE == 1 && before & OPEN == 0 {
            shared.caller.unpark();
        }
    }
}

fn take_tasks(shared: &Shared, task: &Task<'_>, n_tasks: usize, thread_idx: usize) {
    loop {
        let task_idx = shared.next_task.fetch_add(1, Relaxed);
        if task_idx >= n_tasks {
            return;
        }
        attempt(shared, task, task_idx, thread_idx);
    }
}

fn attempt(shared: &Shared, task: &Task<'_>, task_idx: usize, thread_idx: usize) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(task_idx, thread_idx))) {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("a task panicked");
        let mut panic = shared
            .panic
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        panic.get_or_insert_with(|| text.to_owned());
    }
}

fn take_panic(shared: &Shared) -> Result<(), TaskPanicked> {
    let mut panic = shared
        .panic
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    panic.take().map_or(Ok(()), |text| Err(TaskPanicked(text)))
}

/// Spins, then parks, until `is_done`. Whoever makes it true unparks this thread afterwards.
fn wait_until(is_done: impl Fn() -> bool) {
    let mut since = None;
    loop {
        for _ in 0..64 {
            if is_done() {
                return;
            }
            std::hint::spin_loop();
        }
        // A token left over from an earlier unpark only costs one more turn.
        if since.get_or_insert_with(Instant::now).elapsed() >= SPIN {
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once_on_any_number_of_threads() {
        for n_threads in 1..5 {
            let pool = Pool::new(n_threads).expect("threads");
            assert_eq!(pool.n_threads(), n_threads);
            for n_tasks in [0, 1, 2, 3, 17, 1000] {
                let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n_tasks, &|task_idx, thread_idx| {
                    assert!(thread_idx < n_threads);
                    counts[task_idx].fetch_add(1, Relaxed);
                })
                .expect("no panic");
                assert!(counts.iter().all(|count| count.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_jobs_follow_each_other_through_sleeping_and_waking() {
        let pool = Pool::new(3).expect("threads");
        let sum = AtomicUsize::new(0);
        for job_idx in 0..2000 {
            pool.run(4, &|task_idx, _| {
                sum.fetch_add(task_idx, Relaxed);
            })
            .expect("no panic");
            if job_idx % 500 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(sum.load(Relaxed), 2000 * 6);
    }

    #[test]
    fn a_panic_is_reported_and_the_pool_goes_on() {
        let pool = Pool::new(3).expect("threads");
        for n_tasks in [1, 50] {
            let outcome = pool.run(n_tasks, &|task_idx, _| {
                assert!(task_idx != n_tasks - 1, "task {task_idx} is bad")
            });
            assert_eq!(outcome, Err(TaskPanicked(format!("task {} is bad", n_tasks - 1))));
            assert_eq!(pool.run(n_tasks, &|_, _| {}), Ok(()));
        }
    }

    #[test]
    fn several_pools_live_side_by_side_and_end() {
        let pools: Vec<Pool> = (0..4).map(|_| Pool::new(2).expect("threads")).collect();
        for pool in &pools {
            pool.run(8, &|_, _| {}).expect("no panic");
        }
        drop(pools);
    }
}

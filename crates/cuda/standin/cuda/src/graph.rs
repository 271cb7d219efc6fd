//! Graphs: the jobs of a capture, and their instances, which streams do again and again.

use crate::{
    api,
    error::INVALID_VALUE,
    stream::{self, Job},
};

/// Jobs in order.
pub(crate) struct Graph(Vec<Job>);

impl Graph {
    /// What the caller holds; given back by one of the two `Destroy`.
    pub(crate) fn into_handle(jobs: Vec<Job>) -> usize {
        Box::into_raw(Box::new(Self(jobs))) as usize
    }

    /// # Safety
    /// `handle` is one that was given and not given back.
    unsafe fn of<'a>(handle: usize) -> Option<&'a Self> {
        // SAFETY: the caller's promise.
        unsafe { (handle as *const Self).as_ref() }
    }

    /// # Safety
    /// As [`Graph::of`]; it is given back by this.
    unsafe fn take(handle: usize) -> Option<Box<Self>> {
        // SAFETY: the caller's promise.
        (handle != 0).then(|| unsafe { Box::from_raw(handle as *mut Self) })
    }
}

api! {
    /// An instance of a graph.
    fn cuGraphInstantiateWithFlags(instance: *mut usize, graph: usize, _flags: u64) {
        let graph = unsafe { Graph::of(graph) }.ok_or(INVALID_VALUE)?;
        unsafe { *instance = Graph::into_handle(graph.0.clone()) };
        Ok(())
    }
    /// How many jobs there are; which they are is not told.
    fn cuGraphGetNodes(graph: usize, _nodes: *mut usize, count: *mut usize) {
        unsafe { *count = Graph::of(graph).ok_or(INVALID_VALUE)?.0.len() };
        Ok(())
    }
    /// Nothing to do ahead.
    fn cuGraphUpload(instance: usize, _stream: usize) { unsafe { Graph::of(instance) }.map(|_| ()).ok_or(INVALID_VALUE) }
    /// Does all jobs of an instance, one after another.
    fn cuGraphLaunch(instance: usize, stream: usize) {
        let stream = stream::stream(stream)?;
        for job in &unsafe { Graph::of(instance) }.ok_or(INVALID_VALUE)?.0 { stream.push(job.clone())? }
        Ok(())
    }
    /// Gives an instance back; what was launched goes on.
    fn cuGraphExecDestroy(instance: usize) { unsafe { Graph::take(instance) }.map(|_| ()).ok_or(INVALID_VALUE) }
    /// Gives a graph back.
    fn cuGraphDestroy(graph: usize) { unsafe { Graph::take(graph) }.map(|_| ()).ok_or(INVALID_VALUE) }
}

//! Message paths between an executor and its workers

//! Messages between executor and workers, and their codec

//! One rank: open the device, load the model, obey commands

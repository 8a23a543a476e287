"""What tests are made with: stores, workers, clusters, faults, clocks. The only place that builds internals."""

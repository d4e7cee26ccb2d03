"""What proves and measures: benchmarks, calibration, certificates, the doctor."""

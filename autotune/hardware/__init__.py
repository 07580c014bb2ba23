"""The probe: what this machine is and how fast it really runs. Talks to CUDA, NVML and the OS."""

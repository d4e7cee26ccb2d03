"""Looking at schedules, simulated or measured: task times, Gantt charts, traces, words. numpy; pictures need matplotlib."""

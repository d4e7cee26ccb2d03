"""Looking at schedules: task times, Gantt charts, traces, words."""

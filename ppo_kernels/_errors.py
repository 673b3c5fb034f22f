"""What the command line prints without a traceback."""


class UserError(Exception):
    """Something outside the program is missing or wrong, and the message says what to change."""


class Terminated(KeyboardInterrupt):
    """As an interrupt, but by SIGTERM."""

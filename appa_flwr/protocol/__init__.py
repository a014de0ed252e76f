"""Protocol between server and groups: messages, answers' formats, rewards, votes. Both sides may enter."""

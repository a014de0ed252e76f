"""What server and groups say to each other: messages, answers' formats, rewards, votes. Both sides may enter."""

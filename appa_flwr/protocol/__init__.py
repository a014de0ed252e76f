"""Protocol between server and groups: messages, answers' formats, rewards, votes. Imported by both sides."""

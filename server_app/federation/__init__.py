"""The groups as the server meets them: who is there, what they are asked, what they answer."""

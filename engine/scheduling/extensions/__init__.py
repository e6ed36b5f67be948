"""Extensions for requests that need more than pages: beam searches, and models with recurrent states."""

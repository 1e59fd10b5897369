"""All requests and all replies, for the codec and for whoever must handle every one."""

from async_grpo.replay_api.base import Error, Ok
from async_grpo.replay_api.generator import (
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    End,
    EndReply,
    EnginePhase,
    Evaluated,
    GeneratorHeartbeat,
    Insert,
    InsertReply,
    Watch,
    WatchReply,
)
from async_grpo.replay_api.peers import Hello, HelloReply, Leave, Stats, StatsReply
from async_grpo.replay_api.publishing import (
    AbortCell,
    Announce,
    AnnounceReply,
    OpenCell,
    WaitCell,
    WaitCellReply,
)
from async_grpo.replay_api.trainer import (
    Ack,
    Draw,
    DrawReply,
    EvaluationsReply,
    Fetch,
    FetchReply,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    StartTrainerReply,
    TrainerHeartbeat,
    WaitEvaluations,
)

Request = (
    Hello
    | Claim
    | Credit
    | Insert
    | End
    | Evaluated
    | Watch
    | EnginePhase
    | GeneratorHeartbeat
    | StartTrainer
    | TrainerHeartbeat
    | Draw
    | Fetch
    | Ack
    | Settle
    | SetDepth
    | Announce
    | OpenCell
    | WaitCell
    | AbortCell
    | WaitEvaluations
    | Leave
    | Finish
    | Stats
)


Reply = (
    Ok
    | Error
    | HelloReply
    | ClaimReply
    | CreditReply
    | InsertReply
    | EndReply
    | WatchReply
    | StartTrainerReply
    | DrawReply
    | FetchReply
    | AnnounceReply
    | WaitCellReply
    | EvaluationsReply
    | StatsReply
)

// Command generate streams a text, and shows what a refused request looks like.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "pagewire.example/pagewire/v1"
)

func main() {
	address := os.Getenv("PAGEWIRE_ADDRESS")
	if address == "" {
		address = "127.0.0.1:50051"
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewInferenceServiceClient(connection)

	request := &pb.GenerateStreamRequest{
		Input: &pb.GenerateStreamRequest_Chat{Chat: &pb.ChatInput{
			Messages: []*pb.ChatMessage{{Role: "user", Content: "Name three colours."}},
		}},
		SamplingParams: &pb.SamplingParams{
			Temperature: proto.Float32(0),
			MaxTokens:   proto.Int32(32),
		},
	}
	if err := stream(client, request); err != nil {
		log.Fatal(err)
	}

	request.SamplingParams.TopP = proto.Float32(7)
	err = stream(client, request)
	for _, detail := range status.Convert(err).Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			violation := bad.FieldViolations[0]
			fmt.Printf("%s: %s: %s\n", status.Code(err), violation.Field, violation.Description)
		}
	}
}

// The end of the context, by its deadline or by cancel, ends the request at the server.
func stream(client pb.InferenceServiceClient, request *pb.GenerateStreamRequest) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	call, err := client.GenerateStream(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := call.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch frame := response.Frame.(type) {
		case *pb.GenerateStreamResponse_Delta:
			fmt.Print(frame.Delta.Text)
		case *pb.GenerateStreamResponse_Final:
			fmt.Printf("\n%s\n", frame.Final.Outputs[0].FinishReason)
		}
	}
}
